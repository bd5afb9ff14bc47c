"""The launch examples: shells, Kubernetes and Python can read them, and they name what exists."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import yaml

from powerclip.runtime.signals import EXIT_PREEMPTED
from powerclip.train.recipe import find_recipe

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "docs" / "launch"
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}


def docker_instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continued lines joined and comments left out."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line.strip() and not line.startswith("#"))
    pairs = (line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", " ", text).splitlines())
    return [(instruction, rest) for instruction, rest in pairs]


def test_the_dockerfile_is_well_formed_and_its_shell_commands_are():
    instructions = docker_instructions()
    assert {instruction for instruction, _ in instructions} <= INSTRUCTIONS
    for instruction, rest in instructions:
        if instruction == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
            assert "sudo" not in rest
        if instruction == "FROM":
            assert re.search(r":[\w.-]+( AS \w+)?$", rest), f"{rest}: an image without a version changes by itself"
            assert ":latest" not in rest
        if instruction in ("CMD", "ENTRYPOINT"):
            assert all(isinstance(word, str) for word in json.loads(rest))


def test_the_image_copies_what_is_there_and_sent_and_runs_powerclip_as_a_plain_user():
    instructions = docker_instructions()
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"}
    copied = [shlex.split(rest)[:-1] for instruction, rest in instructions if instruction == "COPY"]
    own = {name for names in copied if not names[0].startswith("--from") for name in names}
    assert own == sent
    assert all((ROOT / name).exists() for name in own)
    assert dict(instructions)["ENTRYPOINT"] == '["powerclip"]'
    users = [rest for instruction, rest in instructions if instruction == "USER"]
    assert users
    assert users[-1].split(":")[0] not in ("root", "0")


def test_the_image_holds_all_that_the_wheel_is_made_of():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    parts = {*build["targets"]["wheel"]["packages"], *build["targets"]["wheel"]["force-include"]}
    copied = " ".join(rest for instruction, rest in docker_instructions() if instruction == "COPY").split()
    assert parts <= set(copied)


def test_the_slurm_script_is_a_script_that_queues_a_stopped_job_again():
    path = LAUNCH / "slurm.sh"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    assert f'"$code" -eq {EXIT_PREEMPTED}' in text
    assert "scontrol requeue" in text
    find_recipe(re.search(r"recipes/\S+\.yaml", text)[0])


def test_the_kubernetes_job_starts_a_recipe_that_exists_and_leaves_time_to_stop():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    find_recipe(next(part for part in command if part.startswith("--recipe=")).removeprefix("--recipe="))
    assert command[-2:] == ["--resume", "auto"]
    nodes = int(next(part for part in command if part.startswith("--nnodes=")).removeprefix("--nnodes="))
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == nodes
    assert pod["subdomain"] == service["metadata"]["name"]
    patience = {item["name"]: item["value"] for item in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(patience) < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_ray_script_is_python_that_resumes():
    text = (LAUNCH / "ray_train.py").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [keyword.value.value for call in calls for keyword in call.keywords if keyword.arg == "resume"]
    assert named == ["auto"]
