"""The parts of a model as recipes name them: what is frozen, and what of a start is drawn anew."""

from __future__ import annotations

TOWERS = ("image", "text")  # as train.freeze names them
REDRAWN = (*TOWERS, "heads")  # as model.redraw names what is drawn anew


def parse_redraw(text: str | None) -> list[str]:
    """`text,heads` → the parts that are drawn anew. ValueError when it names something else."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if (text is not None and not parts) or set(parts) - set(REDRAWN):
        raise ValueError(f"model.redraw must name parts, such as text, heads or image,text, not {text!r}")
    return parts


def parse_freeze(text: str | None) -> dict[str, int | None]:
    """`image:8,text` → how many blocks of which tower are frozen; None: all of it. ValueError when it says nothing."""
    frozen: dict[str, int | None] = {}
    for part in text.split(",") if text else ():
        tower, colon, depth = part.strip().partition(":")
        if tower not in TOWERS or (colon and not depth.isdecimal()) or tower in frozen:
            raise ValueError(
                f"train.freeze must name towers and depths, such as image, text or image:8,text, not {text!r}"
            )
        frozen[tower] = int(depth) if colon else None
    return frozen
