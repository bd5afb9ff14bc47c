"""What the docs site makes of the repository: a hook of mkdocs (see mkdocs.yml).

The README and three other pages outside docs/ become pages of the site. Links between pages lead to each other. Links
to other files lead into the repository if POWERCLIP_REPOSITORY gives its address, and are plain text otherwise.
Pages that the navigation does not list are appended to its last section, so that none is lost.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Page of the site → file of the repository.
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "benchmarks.md": "benchmarks/README.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|!?\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^(```.*?^```|~~~.*?^~~~)$", re.DOTALL | re.MULTILINE)
_LIST = re.compile(r"^(?P<before>(?!\s*(?:[-*]|\d+\.) |#|\s*$|\||<).+)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)
_ROW = re.compile(r"^\|.*$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the pages that the navigation does not list."""
    nav: list[Any] = list(config.nav or [])
    listed = re.findall(r"[\w./-]+\.md", str(nav))
    missing = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in listed)
    (section,) = nav[-1]
    nav[-1] = {section: [*nav[-1][section], *missing]}
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    root = Path(config.docs_dir).parent
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links where they should go in the site. Code blocks stay as they are."""
    root = Path(config.docs_dir).parent
    place = page.file.src_uri
    source = OUTSIDE.get(place, f"docs/{place}")

    def follow(match: re.Match[str]) -> str:
        target = match["target"]
        text = _LINK.sub(follow, match["text"])
        if re.match(r"[a-z]+:|#", target):
            return f"{match['image']}[{text}]({target})"
        path, _, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (root / found).exists():
            raise PluginError(f"{source} links to {target}, and there is no {found}")
        pages = {repository: name for name, repository in OUTSIDE.items()}
        inside = pages.get(found) or (found.removeprefix("docs/") if found.startswith("docs/") else None)
        if inside and (root / found).is_file():
            relative = posixpath.relpath(inside, posixpath.dirname(place) or ".")
            return f"{match['image']}[{text}]({relative}{'#' if anchor else ''}{anchor})"
        repository = os.environ.get("POWERCLIP_REPOSITORY", "").rstrip("/")
        return f"[{text}]({repository}/blob/main/{found})" if repository else text

    parts = _FENCE.split(markdown)
    prose = [_as_python_markdown(_LINK.sub(follow, part)) for part in parts[::2]]
    return "".join(text for pair in zip(prose, [*parts[1::2], ""], strict=True) for text in pair)


def _as_python_markdown(text: str) -> str:
    """What GitHub and Python-Markdown read differently: lists without an empty line before, | in code of tables."""
    text = _LIST.sub(r"\g<before>\n\n", text)
    return _ROW.sub(lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]), text)
