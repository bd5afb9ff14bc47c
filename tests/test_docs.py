"""What the documentation shows is what the code does."""

import contextlib
import io
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from powerclip.encoders import Features

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", "docs/math.md"])
def test_the_first_example_of_a_page_prints_what_the_page_says(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    example, shown = fenced(page, "python")[0], page.split("It prints", 1)[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, name, "exec"), {})
    assert printed.getvalue().strip() == fenced(shown, "(?:text)?")[0].strip()


def test_the_method_that_contributing_adds_computes_its_formula():
    example = fenced((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "python")[0]
    names: dict[str, Any] = {}
    exec(compile(example, "CONTRIBUTING.md", "exec"), names)
    image, text = (F.normalize(torch.randn(3, 4, generator=torch.Generator().manual_seed(n)), dim=-1) for n in (0, 1))
    scale, nothing = torch.tensor(5.0), torch.empty(3, 0, 4)
    features = Features(image=image, patches=nothing, text=text, words=nothing, logit_scale=scale)
    terms = names["Sigmoid"]().loss(features, batch=None)
    signed = [(1 if i == j else -1) * 5 * float(image[i] @ text[j]) for i, j in itertools.product(range(3), repeat=2)]
    assert float(terms.total) == pytest.approx(sum(math.log1p(math.exp(-value)) for value in signed) / 3, rel=1e-5)
    assert terms.parts.keys() == {"sigmoid"}


@pytest.mark.parametrize("name", PAGES)
def test_links_between_the_pages_lead_somewhere(name):
    page = ROOT / name
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), f"{name} links to {link}"
            assert not anchor or anchor in headings(target), f"{name} links to {link}#{anchor}"


def test_the_paper_is_cited_by_the_same_authors_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    bibtex = fenced((ROOT / "README.md").read_text(encoding="utf-8"), "bibtex")[0]
    authors = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in cited["authors"])
    assert authors in bibtex
    assert cited["title"] in bibtex
