"""The README and the addresses of a distribution.

A package index shows the README away from the repository, where its relative pictures and links lead nowhere. A release
is built with the address of the repository, and both become absolute:

    POWERCLIP_REPOSITORY=https://github.com/ORGANISATION/powerclip python -m build

Without it the README stays as it is: a wheel that somebody builds from a checkout claims no address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the project table of pyproject.toml."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get("POWERCLIP_REPOSITORY", "").rstrip("/")
        metadata["urls"] = {}
        if repository:
            text = with_absolute_links(text, repository)
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": f"{repository}/tree/main/docs",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, repository: str) -> str:
    """Markdown whose relative pictures and links lead into the repository."""
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:)([^)]+)\)", rf"\g<1>{repository}/raw/main/\g<2>)", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?![a-z]+:|#)([^)]+)\)", rf"\g<1>{repository}/blob/main/\g<2>)", text)
