"""What the tests of studies share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_study import STUDY, write_base


@pytest.fixture
def folder(tmp_path: Path, mini_corpus: Path) -> Path:
    """A folder with `study.yaml` and its base; modules that need another study have a `folder` of their own."""
    write_base(tmp_path, mini_corpus, steps=4, retrieval=True)
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path
