"""Paths of a recipe: variables and patterns become files, and what does not is said."""

from __future__ import annotations

import pytest

from powerclip.data.paths import expand_path, expand_pattern
from powerclip.errors import UserError


def test_a_variable_and_a_pattern_become_the_files_in_order(tmp_path, monkeypatch):
    for name in ("b-1.tar", "b-0.tar", "c.tar"):
        (tmp_path / name).touch()
    monkeypatch.setenv("SHARDS_HERE", str(tmp_path))
    assert expand_pattern("${SHARDS_HERE}/b-*.tar", "data.shards") == [tmp_path / "b-0.tar", tmp_path / "b-1.tar"]
    assert expand_path("$SHARDS_HERE/c.tar", "data.shards") == tmp_path / "c.tar"


def test_a_variable_that_is_not_set_is_named_with_its_setting(monkeypatch):
    monkeypatch.delenv("SHARDS_HERE", raising=False)
    for text in ("${SHARDS_HERE}/a.tar", "$SHARDS_HERE/a.tar"):
        with pytest.raises(UserError, match=r"^data\.shards: .*variable SHARDS_HERE is not set"):
            expand_pattern(text, "data.shards")


def test_a_pattern_that_matches_nothing_is_shown_as_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDS_HERE", str(tmp_path))
    with pytest.raises(UserError, match=rf"^data\.shards: nothing matches {tmp_path}/\*\.tar$"):
        expand_pattern("$SHARDS_HERE/*.tar", "data.shards")
