"""Settings are dataclasses whose annotations say what is allowed; this module checks them, from YAML or from Python.

Types, the values of a `Literal` and the range of a number stand once, beside the field:

    @dataclass(frozen=True)
    class OptimSection:
        lr: NonNegativeFloat = 1e-3  # peak learning rate
        beta1: Annotated[float, Range(ge=0, lt=1)] = 0.9  # decay of the first moment
        schedule: Literal["cosine", "constant"] = "cosine"  # after the warm-up

        def __post_init__(self) -> None:
            validate(self, "optim")  # then the rules between fields

Every complaint names the full key (`optim.lr`) and, for a mistyped key or value, the nearest right one. Understood are
nested dataclasses, `str`, `int`, `float`, `bool`, `Literal`, `dict`, and any of these `| None`. Numbers are finite.

The comment of a field is its description: `docs/settings.md` is made of them (tools/settings_reference.py).
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from powerclip.errors import UserError, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The bounds of a number, for `Annotated[float, Range(gt=0, le=1)]`; a lower one is always given."""

    ge: float | None = None  # value ≥ ge
    gt: float | None = None  # value > gt
    le: float | None = None  # value ≤ le
    lt: float | None = None  # value < lt

    def __post_init__(self) -> None:
        if (self.ge is None) == (self.gt is None) or None not in (self.le, self.lt):
            raise ValueError("a Range has one lower bound and at most one upper bound")

    def __contains__(self, value: float) -> bool:
        above = value >= self.ge if self.ge is not None else self.gt is not None and value > self.gt
        below = (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)
        return above and below

    @property
    def is_interval(self) -> bool:
        """Whether it has an upper bound as well."""
        return self.le is not None or self.lt is not None

    @property
    def symbols(self) -> str:
        """The range as `in [0, 1)`, `≥ 0` or `> 0`."""
        if not self.is_interval:
            return f"≥ {self.ge:g}" if self.ge is not None else f"> {self.gt:g}"
        lower = f"[{self.ge:g}" if self.ge is not None else f"({self.gt:g}"
        upper = f"{self.le:g}]" if self.le is not None else f"{self.lt:g})"
        return f"in {lower}, {upper}"

    def __str__(self) -> str:
        if self.is_interval:
            return self.symbols
        if self.ge is not None:
            return f"at least {self.ge:g}"
        return "positive" if self.gt == 0 else f"above {self.gt:g}"


PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
Share = Annotated[float, Range(ge=0, le=1)]
PositiveShare = Annotated[float, Range(gt=0, le=1)]


def validate(instance: object, section: str = "") -> None:
    """Check every field of a dataclass against its annotation; called in its `__post_init__`.

    Raises:
        ValueError: a value of another type, outside its range or none of its `Literal`'s, named by `section.field`.
    """
    for name, kind in field_types(type(instance)).items():
        value = getattr(instance, name)
        if not is_dataclass(kind):
            _convert(value, kind, _join(section, name))
        elif not isinstance(value, kind):  # type: ignore[arg-type]
            raise ValueError(f"'{_join(section, name)}' must be {_name(kind)}, got {_show(value)}")


def check(values: object, cls: type, where: str, section: str = "") -> dict[str, Any]:
    """Plain values, as read from YAML, with each leaf converted to the type of its field in the dataclass `cls`.

    Keys may be left out: a recipe that extends another holds only what it changes. `where` is the file (or the command
    line) that the values come from and `section` the dotted path that leads to them.

    Raises:
        UserError: an unknown key, or what `validate` refuses.
    """
    try:
        return _convert_mapping(values, cls, section)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass `cls` from values that `check` has passed."""
    kinds = field_types(cls)
    arguments = {key: build(kinds[key], value) if is_dataclass(kinds[key]) else value for key, value in values.items()}
    return cls(**arguments)


def field_types(cls: type) -> dict[str, Any]:
    """Field name → annotation of a dataclass, `Annotated` included, with strings resolved."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def options(kind: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: those of a union, or the annotation itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def parse_yaml(text: str, where: str) -> Any:
    """The value that `text` holds; UserError with `where` and the line when it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text.strip() else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{where}{line}: not valid YAML: {problem}") from None
    except (ValueError, RecursionError) as error:  # PyYAML's own for a month 13, `!!int x`, a thousand brackets
        raise UserError(f"{where}: not valid YAML: {error}") from None


def to_yaml(value: Any) -> str:
    """`value` as YAML text, keys in the order given."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads numbers as YAML 1.2 does and refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int, float)):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML follows, wants a dot and a signed exponent in a float: `1e-3` would be a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _convert_mapping(values: object, cls: type, section: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        subject = f"'{section}' " if section else ""
        raise ValueError(f"{subject}must be a mapping of keys to values, got {_show(values)}")
    kinds = field_types(cls)
    converted: dict[str, Any] = {}
    for key, value in values.items():
        path = _join(section, str(key))
        if key not in kinds:
            hint = nearest(str(key), list(kinds)) or f"; known: {', '.join(kinds)}"
            raise ValueError(f"unknown key '{path}'{hint}")
        convert = _convert_mapping if is_dataclass(kinds[key]) else _convert
        converted[key] = convert(value, kinds[key], path)
    return converted


def _convert(value: Any, kind: Any, key: str) -> Any:
    """`value` as the type that `kind` says, within its range; ValueError naming `key` otherwise."""
    alternatives = options(kind)
    for option in alternatives:
        plain, limits = _split(option)
        if not _fits(value, plain):
            continue
        if plain is float:
            value = _as_float(value)
        if plain in (int, float):
            _check_range(value, limits, key, optional=type(None) in alternatives)
        return value
    choices = [str(choice) for option in alternatives if get_origin(option) is Literal for choice in get_args(option)]
    hint = nearest(value, choices) if isinstance(value, str) else ""
    raise ValueError(f"'{key}' must be {' or '.join(map(_name, alternatives))}, got {_show(value)}{hint}")


def _split(kind: Any) -> tuple[Any, Range | None]:
    """The type of an annotation and its range, if it has one."""
    if get_origin(kind) is not Annotated:
        return kind, None
    plain, *extras = get_args(kind)
    return plain, next((extra for extra in extras if isinstance(extra, Range)), None)


def _fits(value: Any, kind: Any) -> bool:
    if kind is type(None):
        return value is None
    if get_origin(kind) is Literal:
        # True == 1 in Python: compare the types as well.
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if kind is float or kind is int:
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    return isinstance(value, get_origin(kind) or kind)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


def _check_range(value: float, limits: Range | None, key: str, *, optional: bool) -> None:
    finite = isinstance(value, int) or math.isfinite(value)
    if finite and (limits is None or value in limits):
        return
    if limits is None:
        expected = "be finite"
    elif limits.is_interval:
        expected = f"lie {limits}"
    else:
        expected = f"be {limits}" if finite else f"be {limits} and finite"
    raise ValueError(f"{key} must {expected}{' or null' if optional else ''}, not {value}")


def _name(kind: Any) -> str:
    plain, _ = _split(kind)
    if plain is type(None):
        return "null"
    if get_origin(plain) is Literal:
        return " | ".join(str(choice) for choice in get_args(plain))
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        dict: "a mapping of keys to values",
    }
    return names.get(get_origin(plain) or plain, getattr(plain, "__name__", str(plain)))


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
