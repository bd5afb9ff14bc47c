"""Constituency parsers of captions behind one interface: `load_parser("embedded").parse(captions)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from powerclip.annotate.parsers.base import Fallback, FlatParser, Parsed, Parser
from powerclip.errors import UserError, nearest
from powerclip.runtime.distributed import choose_device

PARSERS = ["embedded", "stanza", "benepar", "flat"]


def load_parser(name: str = "embedded", device: str = "auto", **options: Any) -> Parser:
    """The parser called `name`, ready to parse.

    Args:
        name: `embedded` (ships with the package), `stanza`, `benepar` (extras of the same names) or `flat`.
        device: where it computes: `cpu`, `cuda`, `cuda:1`, or `auto` for a GPU when there is one.
        options: what the parser's class takes beside the device.

    Raises:
        UserError: no parser has this name, the device or option is not there, or the library or model is missing.
    """
    if name not in PARSERS:
        raise UserError(f"no parser is called {name!r}{nearest(name, PARSERS)}; there are {', '.join(PARSERS)}")
    if name == "flat":
        return _make(FlatParser, name, options)
    device = str(choose_device(device, setting="--device"))
    if name == "stanza":
        from powerclip.annotate.parsers.stanza_adapter import StanzaParser

        return _make(StanzaParser, name, {"device": device, **options})
    if name == "benepar":
        from powerclip.annotate.parsers.benepar_adapter import BeneparParser

        return _make(BeneparParser, name, {"device": device, **options})
    from powerclip.annotate.parsers.embedded import EmbeddedParser

    return _make(EmbeddedParser, name, {"device": device, **options})


def _make(kind: Callable[..., Parser], name: str, options: dict[str, Any]) -> Parser:
    known = [option for option in inspect.signature(kind).parameters if option != "device"]
    for option in options:
        if option != "device" and option not in known:
            options_known = f"it has {', '.join(known)}" if known else "it has none"
            raise UserError(f"the parser {name} has no option {option!r}{nearest(option, known)}; {options_known}")
    return kind(**options)


__all__ = ["PARSERS", "Fallback", "Parsed", "Parser", "load_parser"]
