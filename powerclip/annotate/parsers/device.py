"""Where a parser computes."""

from __future__ import annotations

from powerclip.errors import UserError


def choose_device(name: str) -> str:
    """The device of that name; `auto` is a GPU when there is one.

    Raises:
        UserError: there is no such device.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise UserError(f"parsers have no device {name!r}; it is auto, cpu, cuda or cuda:0, cuda:1, …")
    if kind == "cuda" and (not torch.cuda.is_available() or int(number or 0) >= torch.cuda.device_count()):
        raise UserError(f"device {name} is not there: torch sees {torch.cuda.device_count()} GPUs; use --device auto")
    return name
