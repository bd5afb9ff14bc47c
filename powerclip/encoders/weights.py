"""Weights on their way into a model: found, downloaded, read, checked against the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import open_clip
from open_clip.factory import load_state_dict
from open_clip.model import convert_to_custom_text_state_dict
from torch import Tensor, nn

from powerclip.errors import UserError, first_line

# The order of preference is open_clip's own, so that both read the same file of a directory that holds several.
WEIGHT_FILES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pth",
    "open_clip_pytorch_model.pt",
    "model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.pth",
    "model.pth",
    "model.pt",
)
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")


def find_weights(directory: Path) -> Path:
    """The weights file of an open_clip directory."""
    for name in WEIGHT_FILES:
        if (directory / name).is_file():
            return directory / name
    others = sorted(path for path in directory.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if len(others) == 1:
        return others[0]
    if not others:
        raise UserError(f"{directory}: no weights beside the config, expected {WEIGHT_FILES[0]}")
    names = ", ".join(path.name for path in others)
    raise UserError(f"{directory}: several files could be the weights ({names}): rename one to {WEIGHT_FILES[0]}")


def download(pretrained: dict[str, Any], what: str) -> Path:
    """Fetch a file that open_clip's `pretrained` entry describes, or take it from the local cache."""
    try:
        return Path(open_clip.download_pretrained(pretrained))
    # The hub, its cache and the network raise a dozen unrelated types.
    except Exception as error:
        raise UserError(f"could not download {what}: {first_line(error)}") from error


def load_weights(clip: nn.Module, path: Path, source: str, *, convert: bool = False) -> None:
    """Fill `clip` with the weights in `path`.

    Args:
        clip: open_clip's model.
        path: a safetensors file, or a state dict that torch saved.
        source: where the model's config came from, for the message.
        convert: let open_clip translate older layouts and interpolate positions, as it does for published weights.
            Without it every name and shape must be the config's.

    Raises:
        UserError: the file cannot be read, or does not fit.
    """
    if convert:
        try:
            open_clip.load_checkpoint(clip, str(path))
        # A damaged file surfaces as anything from EOFError to UnpicklingError to SafetensorError.
        except Exception as error:
            cause = _differences(clip, _read(path)) or first_line(error)
            raise UserError(f"{path}: these weights do not fit {source}: {cause}") from error
        return
    fit_weights(clip, _read(path), str(path), source)


def fit_weights(clip: nn.Module, weights: dict[str, Tensor], where: str, source: str) -> None:
    """Fill `clip` with a state dict, found in `where`, whose names and shapes must be those of the config's towers."""
    if "positional_embedding" in weights and hasattr(clip, "text"):
        weights = convert_to_custom_text_state_dict(weights)
    state = clip.state_dict()
    for name in ("logit_scale", "logit_bias"):  # stored as a scalar or as a vector of one
        if name in weights and name in state and weights[name].numel() == state[name].numel():
            weights[name] = weights[name].reshape(state[name].shape)
    differences = _differences(clip, weights)
    if differences:
        raise UserError(f"{where}: these weights do not fit {source}: {differences}")
    clip.load_state_dict(weights)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        weights = load_state_dict(str(path))
    except Exception as error:
        raise UserError(
            f"{path}: not a readable weights file, damaged or cut short ({type(error).__name__}): copy or save it again"
        ) from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{path}: holds something else than a model's weights")
    return weights


def _differences(clip: nn.Module, weights: dict[str, Tensor]) -> str:
    """What keeps `weights` from being `clip`'s, in a few words; empty when nothing does."""
    state = clip.state_dict()
    differences = []
    missing = [name for name in state if name not in weights]
    foreign = [name for name in weights if name not in state]
    wrong = [name for name in state if name in weights and state[name].shape != weights[name].shape]
    if missing:
        differences.append(f"{len(missing)} missing (first {missing[0]})")
    if foreign:
        differences.append(f"{len(foreign)} unknown (first {foreign[0]})")
    if wrong:
        name = wrong[0]
        differences.append(
            f"{len(wrong)} of another shape (first {name}: {list(weights[name].shape)} in the file, "
            f"{list(state[name].shape)} by the config)"
        )
    return ", ".join(differences)
