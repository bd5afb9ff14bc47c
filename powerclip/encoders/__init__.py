"""The dual encoder over open_clip: two towers in, global and dense features out.

`build`, `load`, `save`, `preprocess_for` and `tokenizer_for` import open_clip on first use; the rest needs only torch.
"""

from typing import TYPE_CHECKING, Any

from powerclip.encoders.dual import DualEncoder
from powerclip.encoders.features import Features, ImageFeatures
from powerclip.encoders.selector import PatchContext, PatchSelector, RandomPatches, Selection
from powerclip.encoders.text import trim

if TYPE_CHECKING:
    from powerclip.encoders.directory import save
    from powerclip.encoders.resolve import build, load
    from powerclip.encoders.transforms import preprocess_for, tokenizer_for

__all__ = [
    "DualEncoder",
    "Features",
    "ImageFeatures",
    "PatchContext",
    "PatchSelector",
    "RandomPatches",
    "Selection",
    "build",
    "load",
    "preprocess_for",
    "save",
    "tokenizer_for",
    "trim",
]

_LAZY = {
    "build": "resolve",
    "load": "resolve",
    "preprocess_for": "transforms",
    "save": "directory",
    "tokenizer_for": "transforms",
}


def __getattr__(name: str) -> Any:
    # open_clip takes seconds to import: a reader of `Features` should not wait for it.
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
