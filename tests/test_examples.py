"""The examples in docstrings run as printed, and every loss of the paper's tables has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import powerclip
from powerclip.objectives.a_clip import byol_loss, simclr_loss
from powerclip.objectives.clip import clip_loss
from powerclip.objectives.clip_pgs import ClipPgs
from powerclip.objectives.e_clip import EClip
from powerclip.objectives.filip import filip_loss
from powerclip.objectives.flip import Flip
from powerclip.objectives.powerclip import PowerClip
from powerclip.objectives.sparc import sparc_loss

ROOT = Path(powerclip.__file__).parent
MODULES = sorted(
    ".".join(("powerclip", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
LOSSES = (clip_loss, Flip, simclr_loss, byol_loss, EClip, ClipPgs, filip_loss, sparc_loss, PowerClip)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run_as_printed(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0, "see the output above"


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_every_loss_says_what_it_takes_what_it_raises_and_shows_an_example(loss: Callable[..., Any]):
    text = inspect.getdoc(loss)
    assert text is not None
    assert all(section in text for section in ("Args:", "Raises:", "Examples:", ">>> "))
    paper = inspect.getdoc(inspect.getmodule(loss))
    assert paper is not None
    assert any(f"20{year}" in paper for year in range(20, 27))  # where it was published
