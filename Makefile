# The few verbs of this project. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-gpu lint format docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Installs once; runs again only when the dependencies change.
$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

quickstart: $(READY) ## train CLIP and PowerCLIP side by side on embedded scenes (about 5 minutes on 2 cores)
	$(BIN)/powerclip quickstart

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## lint, types and tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu: $(READY) ## what needs a GPU, on one: under 5 minutes, with a record in benchmarks/results
	$(BIN)/python benchmarks/gpu_tests.py

format: $(READY) ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY) ## build the documentation into site/, and fail on broken links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean: ## remove the virtual environment, site/ and caches (runs/ stays)
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache
