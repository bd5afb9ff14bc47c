"""PowerCLIP: contrastive pre-training that aligns every set of image regions with every phrase of the caption."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["ground", "load", "save"]

if TYPE_CHECKING:
    from powerclip.encoders import load, save
    from powerclip.evaluate.ground import ground


def __getattr__(name: str) -> Any:
    # open_clip takes seconds to import: only those who use a model pay for it.
    if name == "ground":
        from powerclip.evaluate.ground import ground

        return ground
    if name in __all__:
        from powerclip import encoders

        return getattr(encoders, name)
    raise AttributeError(f"module 'powerclip' has no attribute {name!r}")
