"""One file for each method of the paper's tables, behind one name."""

from collections.abc import Mapping
from typing import Any

from powerclip.alignment.config import AlignmentConfig
from powerclip.errors import UserError, nearest
from powerclip.objectives.a_clip import AClip, AClipSettings
from powerclip.objectives.base import Objective, Phase, Plan, Terms
from powerclip.objectives.clip import Clip
from powerclip.objectives.clip_pgs import ClipPgs, ClipPgsSettings
from powerclip.objectives.e_clip import EClip, EClipSettings
from powerclip.objectives.filip import Filip, FilipSettings
from powerclip.objectives.flip import Flip, FlipSettings
from powerclip.objectives.powerclip import PowerClip
from powerclip.objectives.sparc import Sparc, SparcSettings

# Name → the objective and the dataclass of its `objective_settings`. PowerCLIP's are the recipe's `alignment`.
_WITH_SETTINGS: dict[str, tuple[Any, type]] = {
    "flip": (Flip, FlipSettings),
    "a_clip": (AClip, AClipSettings),
    "e_clip": (EClip, EClipSettings),
    "clip_pgs": (ClipPgs, ClipPgsSettings),
    "filip": (Filip, FilipSettings),
    "sparc": (Sparc, SparcSettings),
}
SETTINGS: dict[str, type] = {name: settings for name, (_, settings) in _WITH_SETTINGS.items()}
OBJECTIVES = ("clip", *SETTINGS, "powerclip")

__all__ = [
    "OBJECTIVES",
    "SETTINGS",
    "AClip",
    "AClipSettings",
    "Clip",
    "ClipPgs",
    "ClipPgsSettings",
    "EClip",
    "EClipSettings",
    "Filip",
    "FilipSettings",
    "Flip",
    "FlipSettings",
    "Objective",
    "Phase",
    "Plan",
    "PowerClip",
    "Sparc",
    "SparcSettings",
    "Terms",
    "build_objective",
]


def build_objective(
    name: str, alignment: AlignmentConfig | None = None, settings: Mapping[str, Any] | None = None
) -> Objective:
    """The objective of that name; `alignment` is what powerclip uses of the recipe, `settings` what the others do."""
    if name in _WITH_SETTINGS:
        objective, kind = _WITH_SETTINGS[name]
        return objective(kind(**(settings or {})))  # type: ignore[no-any-return]
    if settings:
        raise UserError(f"objective {name} has no objective_settings ({', '.join(settings)})")
    if name == "clip":
        return Clip()
    if name == "powerclip":
        return PowerClip(alignment)
    raise UserError(f"objective {name!r} is not one of {', '.join(OBJECTIVES)}{nearest(name, list(OBJECTIVES))}")
