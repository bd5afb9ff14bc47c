"""Settings: what an annotation allows is what YAML and Python may say, and a complaint names the key."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import pytest

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.config import PRESETS, Preset
from powerclip.errors import UserError
from powerclip.objectives import OBJECTIVES, SETTINGS, FlipSettings
from powerclip.settings import NonNegativeInt, PositiveFloat, Range, Share, build, check, field_types, validate
from powerclip.train.recipe import Recipe, load_recipe, parse_recipe
from powerclip.train.sections import DEFAULT_SCENES, TrainSection


@dataclass(frozen=True)
class Inner:
    share: Share = 0.5
    beta: Annotated[float, Range(ge=0, lt=1)] = 0.9
    limit: PositiveFloat | None = None
    above: Annotated[int, Range(gt=2)] = 3
    count: NonNegativeInt = 1
    free: float = 0.0
    mode: Literal["fast", "slow"] = "fast"
    on: bool = True
    name: str | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate(self, "inner")


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        validate(self)


ALLOWED = [
    ("share", 0),
    ("share", 1.0),
    ("beta", 0.0),
    ("limit", 1e-9),
    ("limit", None),
    ("above", 3),
    ("count", 0),
    ("count", 10**400),
    ("free", -1e300),
    ("mode", "slow"),
    ("on", False),
    ("name", ""),
    ("extras", {"a": [1]}),
]
REFUSED = [
    ("share", -0.1, r"inner\.share must lie in \[0, 1\], not -0\.1"),
    ("share", math.nan, r"inner\.share must lie in \[0, 1\], not nan"),
    ("share", "half", r"'inner\.share' must be a number, got 'half'"),
    ("share", True, r"'inner\.share' must be a number, got True"),
    ("beta", 1.0, r"inner\.beta must lie in \[0, 1\), not 1\.0"),
    ("limit", 0.0, r"inner\.limit must be positive or null, not 0\.0"),
    ("limit", math.inf, r"inner\.limit must be positive and finite or null, not inf"),
    ("limit", 10**400, r"inner\.limit must be positive and finite or null, not inf"),
    ("limit", [1], r"'inner\.limit' must be a number or null, got \[1\]"),
    ("above", 2, r"inner\.above must be above 2, not 2"),
    ("count", -1, r"inner\.count must be at least 0, not -1"),
    ("count", 1.0, r"'inner\.count' must be a whole number, got 1\.0"),
    ("free", math.nan, r"inner\.free must be finite, not nan"),
    ("mode", "fats", r"'inner\.mode' must be fast \| slow, got 'fats' \(did you mean 'fast'\?\)"),
    ("mode", None, r"'inner\.mode' must be fast \| slow, got None"),
    ("on", 1, r"'inner\.on' must be true or false, got 1"),
    ("name", 3, r"'inner\.name' must be a text or null, got 3"),
    ("extras", [], r"'inner\.extras' must be a mapping of keys to values, got \[\]"),
]


@pytest.mark.parametrize(("name", "value"), ALLOWED)
def test_what_an_annotation_allows_is_taken_from_yaml_and_from_python(name, value):
    assert getattr(Inner(**{name: value}), name) == value
    built = build(Outer, check({"inner": {name: value}}, Outer, "file"))
    assert getattr(built.inner, name) == value


@pytest.mark.parametrize(("name", "value", "complaint"), REFUSED)
def test_what_it_does_not_is_refused_in_the_same_words(name, value, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        Inner(**{name: value})
    with pytest.raises(UserError, match=f"^file: {complaint}$"):
        check({"inner": {name: value}}, Outer, "file")


def test_a_whole_number_becomes_a_float_where_one_is_asked_for():
    assert isinstance(check({"inner": {"share": 1}}, Outer, "file")["inner"]["share"], float)


def test_unknown_keys_and_sections_that_are_none_are_named():
    with pytest.raises(UserError, match=r"^file: unknown key 'inner\.shar' \(did you mean 'share'\?\)$"):
        check({"inner": {"shar": 1}}, Outer, "file")
    with pytest.raises(UserError, match=r"^file: 'inner' must be a mapping of keys to values, got 3$"):
        check({"inner": 3}, Outer, "file")
    with pytest.raises(UserError, match=r"^file: must be a mapping of keys to values, got \[\]$"):
        check([], Outer, "file")
    with pytest.raises(ValueError, match="'inner' must be Inner, got 3"):
        Outer(inner=3)


@pytest.mark.parametrize("bounds", [{}, {"le": 1}, {"ge": 0, "gt": 0}, {"ge": 0, "le": 1, "lt": 1}])
def test_a_range_has_one_lower_and_at_most_one_upper_bound(bounds):
    with pytest.raises(ValueError, match="one lower bound"):
        Range(**bounds)


def test_the_projects_settings_are_checked_when_python_builds_them():
    with pytest.raises(ValueError, match=r"^alignment\.tau must be positive, not 0\.0$"):
        AlignmentConfig(tau=0.0)
    with pytest.raises(ValueError, match=r"^'alignment\.preset' must be default \| paper, got 'papr'"):
        AlignmentConfig.named("papr")
    with pytest.raises(ValueError, match=r"^objective_settings\.keep must lie in \(0, 1\], not 0\.0$"):
        FlipSettings(keep=0)
    with pytest.raises(ValueError, match=r"^'train\.steps' must be a whole number, got '10'$"):
        TrainSection(steps="10")


def test_names_that_stand_in_an_annotation_and_in_a_table_are_the_same():
    assert set(get_args(Preset)) == set(PRESETS)
    assert set(get_args(field_types(Recipe)["objective"])) == set(OBJECTIVES)


@pytest.mark.parametrize("kind", SETTINGS.values())
def test_the_settings_of_every_method_are_checked_by_their_full_key(kind):
    name = next(iter(field_types(kind)))
    with pytest.raises(ValueError, match=rf"objective_settings\.{name}"):
        kind(**{name: "no number"})


@pytest.mark.parametrize(("written", "count"), [("true", DEFAULT_SCENES), ("false", 0), ("0", 0), ("1000", 1000)])
def test_test_scenes_are_a_number_and_true_means_the_usual_one(written, count):
    assert load_recipe("quickstart/clip", [f"evaluation.scenes={written}"]).evaluation.scenes == count
    snapshot = f"model: {{name: ViT-B-16}}\nevaluation: {{scenes: {written}}}\n"
    assert parse_recipe(snapshot, "snapshot").evaluation.scenes == count


@pytest.mark.parametrize("written", ["-1", "1.5", "many"])
def test_no_number_of_test_scenes_is_refused(written):
    with pytest.raises(UserError, match=r"evaluation\.scenes"):
        load_recipe("quickstart/clip", [f"evaluation.scenes={written}"])
