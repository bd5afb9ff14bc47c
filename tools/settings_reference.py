"""Write docs/settings.md, the reference of all settings of a recipe, from the dataclasses that define them.

    python tools/settings_reference.py           # write the page
    python tools/settings_reference.py --check   # exit with 1 if the page is not what the classes say

A field's description is the comment behind it or, where that is too long, the comment lines directly above it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from powerclip.alignment.config import PRESETS, AlignmentConfig
from powerclip.objectives import SETTINGS
from powerclip.settings import field_types, options
from powerclip.train.recipe import FREE_ON_RESUME, Recipe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

INTRODUCTION = """\
# Settings

<!-- Written by tools/settings_reference.py from the config classes. Change the classes, then run it again. -->

Every key of a recipe, what it may be, and what it is when a recipe does not say. A recipe is a YAML file that may
extend another; on the command line any key is `section.key=value`:

```yaml
# mine.yaml
extends: recipes/quickstart/base.yaml
objective: powerclip
alignment: {largest_set: 0}
optim: {lr: 5e-4}
```

```bash
powerclip train --recipe mine.yaml train.steps=1000 alignment.weight=0.5
```

What is not in these tables is an error that names the nearest key. In Python the same settings are
`powerclip.train.recipe.Recipe` and its parts, checked when they are built.
"""


def page() -> str:
    """The whole page."""
    types = field_types(Recipe).items()
    sections = {name: kind for name, kind in types if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    parts = [INTRODUCTION, "## Top level\n", table(Recipe, leave_out=[*sections])]
    for name, kind in sections.items():
        parts += [f"## {name}\n", f"{summary(kind)}\n", table(kind)]
        if kind is AlignmentConfig:
            parts += [presets()]
    parts += [
        "## objective_settings\n",
        paragraph(
            "The methods that powerclip is compared with have settings of their own; `clip` has none, and powerclip's "
            "are `alignment`."
        ),
    ]
    for name, settings in SETTINGS.items():
        parts += [f"### {name}\n", f"{summary(settings)}\n", table(settings)]
    parts += [
        "## Resuming a run\n",
        paragraph(
            "A run continues with the recipe that it began with. These keys may change, since they do not decide what "
            f"it computes: {', '.join(f'`{key}`' for key in sorted(FREE_ON_RESUME))}."
        ),
    ]
    return "\n".join(parts)


def table(cls: type, leave_out: list[str] | None = None) -> str:
    """The fields of a dataclass: key, allowed values, default, description."""
    described, kinds = descriptions(cls), field_types(cls)
    rows = [
        [f"`{field.name}`", values(kinds[field.name]), default(field), described[field.name]]
        for field in dataclasses.fields(cls)
        if field.name not in (leave_out or [])
    ]
    return markdown(["key", "values", "default", "meaning"], rows)


def presets() -> str:
    """What the presets of the alignment loss say, where they differ."""
    names = list(PRESETS)
    changed = [key for key in field_types(AlignmentConfig) if any(key in preset for preset in PRESETS.values())]
    configs = {name: AlignmentConfig.named(name) for name in names}
    rows = [[f"`{key}`", *(show(getattr(configs[name], key)) for name in names)] for key in changed]
    text = paragraph(
        "`preset` sets these; the keys beside it change single ones. A recipe that names a preset starts afresh from "
        "it: what the recipe that it extends says about `alignment` does not count."
    )
    return "\n".join([text, markdown(["key", *(f"`preset: {name}`" for name in names)], rows)])


def paragraph(text: str) -> str:
    """The text in lines of the usual length."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def summary(cls: type) -> str:
    """The first paragraph of a class's docstring, on one line."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def values(kind: Any) -> str:
    """What an annotation allows, in words."""
    return ", or ".join(_values(option) for option in options(kind))


def _values(kind: Any) -> str:
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    if get_origin(kind) is Annotated:
        plain, limits = get_args(kind)
        return f"{_values(plain)} {limits.symbols}"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return names.get(kind, "mapping")


def default(field: dataclasses.Field[Any]) -> str:
    """A field's default, as YAML writes it."""
    if field.default is not dataclasses.MISSING:
        return show(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else show(field.default_factory())


def show(value: object) -> str:
    """A value as YAML writes it."""
    words = {None: "null", True: "true", False: "false"}
    return f"`{words[value] if value is None or isinstance(value, bool) else value}`"


def descriptions(cls: type) -> dict[str, str]:
    """Field → description, from the comments in the class's source; an error names a field that has none."""
    source = textwrap.dedent(inspect.getsource(cls))
    comments = {
        token.start[0]: (token.string.lstrip("# "), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }  # line → comment, whether it has the line to itself
    (definition,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    described: dict[str, str] = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert node.end_lineno is not None
            if node.end_lineno in comments:
                described[node.target.id] = comments[node.end_lineno][0]
            else:
                described[node.target.id] = " ".join(_above(node.lineno, comments))
    for field in dataclasses.fields(cls):
        if not described.get(field.name):
            raise SystemExit(f"{cls.__name__}.{field.name} has no description: write a comment behind it")
    return described


def _above(line: int, comments: dict[int, tuple[str, bool]]) -> Iterator[str]:
    first = line
    while comments.get(first - 1, ("", False))[1]:
        first -= 1
    return (comments[number][0] for number in range(first, line))


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description="Write docs/settings.md from the config classes.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not current")
    arguments = parser.parse_args()
    content = page()
    if not arguments.check:
        PAGE.write_text(content, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != content:
        sys.exit("docs/settings.md is not current: run python tools/settings_reference.py")


if __name__ == "__main__":
    main()
