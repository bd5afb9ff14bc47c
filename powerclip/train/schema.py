"""Check plain values (as read from YAML) against a dataclass and build it; every complaint names the key.

Understood: nested dataclasses, `str`, `int`, `float`, `bool`, `Literal`, `dict`, and any of these `| None`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from powerclip.errors import UserError, nearest

T = TypeVar("T")


def check(values: object, cls: type, where: str, prefix: str = "") -> dict[str, Any]:
    """`values` with each leaf converted to the type of its field in `cls`; UserError for what does not fit.

    Keys may be left out: a recipe that extends another holds only what it changes. `where` is the file (or
    the command line) that the values come from and `prefix` the dotted path that leads to them.
    """
    if not isinstance(values, Mapping):
        section = f"'{prefix.rstrip('.')}'" if prefix else "the recipe"
        raise UserError(f"{where}: {section} must be a mapping of keys to values, got {_show(values)}")
    hints = field_types(cls)
    checked: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            hint = nearest(str(key), list(hints)) or f"; known: {', '.join(hints)}"
            raise UserError(f"{where}: unknown key '{prefix}{key}'{hint}")
        checked[key] = _convert(value, hints[key], where, f"{prefix}{key}")
    return checked


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass `cls` from values that `check` has passed."""
    hints = field_types(cls)
    arguments = {key: build(hints[key], value) if is_dataclass(hints[key]) else value for key, value in values.items()}
    return cls(**arguments)


def field_types(cls: type) -> dict[str, Any]:
    """Field name → type of a dataclass, with the string annotations resolved."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _convert(value: Any, kind: Any, where: str, key: str) -> Any:
    if is_dataclass(kind):
        return check(value, kind, where, f"{key}.")  # type: ignore[arg-type]
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for option in options:
        fits, converted = _fit(value, option)
        if fits:
            return converted
    hint = ""
    if isinstance(value, str):
        hint = nearest(value, [choice for option in options for choice in _choices(option)])
    raise UserError(f"{where}: '{key}' must be {' or '.join(map(_name, options))}, got {_show(value)}{hint}")


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether `value` is a `kind`, and the value as that kind."""
    if kind is type(None):
        return value is None, None
    if get_origin(kind) is Literal:
        # True == 1 in Python: compare the types as well.
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind)), value
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number, float(value) if number else value
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if kind is dict or get_origin(kind) is dict:
        return isinstance(value, dict), value
    return isinstance(value, kind), value


def _choices(kind: Any) -> list[str]:
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def _name(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        return " | ".join(str(choice) for choice in get_args(kind))
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        dict: "a mapping of keys to values",
    }
    return names.get(get_origin(kind) or kind, str(kind))


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
