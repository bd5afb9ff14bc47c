"""One file for each method of the paper's tables, behind one name."""

from powerclip.alignment.config import AlignmentConfig
from powerclip.errors import UserError, nearest
from powerclip.objectives.base import Objective, Terms, encode
from powerclip.objectives.clip import Clip
from powerclip.objectives.powerclip import PowerClip

OBJECTIVES = ("clip", "powerclip")

__all__ = ["OBJECTIVES", "Clip", "Objective", "PowerClip", "Terms", "build_objective", "encode"]


def build_objective(name: str, alignment: AlignmentConfig | None = None) -> Objective:
    """The objective of that name; `alignment` is what powerclip uses of the recipe."""
    if name == "clip":
        return Clip()
    if name == "powerclip":
        return PowerClip(alignment)
    raise UserError(f"objective {name!r} is not one of {', '.join(OBJECTIVES)}{nearest(name, list(OBJECTIVES))}")
