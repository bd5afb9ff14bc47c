"""What the documentation shows is what the code does."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_example_of_the_mathematics_prints_what_the_page_says():
    page = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
    example, shown = fenced(page, "python")[0], page.split("It prints", 1)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "docs/math.md", "exec"), {})
    assert printed.getvalue().strip() == fenced(shown, "")[0].strip()


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_links_between_the_pages_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in link:
            assert ((ROOT / page).parent / link).exists(), f"{page} links to {link}"
