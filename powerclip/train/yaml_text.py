"""YAML in and out, strictly: `1e-3` is a number, a key stands once, a mistake names its file and line."""

from __future__ import annotations

import re
from typing import Any

import yaml

from powerclip.errors import UserError


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


def parse(text: str, where: str) -> Any:
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


def write(value: Any) -> str:
    """`value` as YAML text, keys in the order given."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
