"""The docs site: it builds strictly, needs no network, and a link that leads nowhere fails it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="builds the docs: pip install 'powerclip[docs]'")
pytest.importorskip("mkdocstrings", reason="builds the docs: pip install 'powerclip[docs]'")

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(config), "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_in_the_site_and_in_its_navigation(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    assert "every <strong>set of image regions</strong>" in index  # the README
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).is_file()
        assert f'href="{page.stem}.html"' in index, f"{page.name} is in no menu"


def test_no_page_fetches_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*src=\"(https?:)?//", text)
        fetched += re.findall(r"<link[^>]*rel=\"(?:stylesheet|preconnect|icon)\"[^>]*href=\"(https?:)?//", text)
        assert not fetched, page


def test_the_reference_is_made_of_docstrings(site):
    page = (site / "reference" / "alignment.html").read_text(encoding="utf-8")
    for name in ("AlignmentConfig", "alignment_loss", "random_boxes"):
        assert f'id="powerclip.alignment.{name}"' in page
    assert "image i and caption i match" in page


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("[gone](missing.md) [code](`not a link`)\n", encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# Title\n", encoding="utf-8")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"site_name: x\nhooks: [{ROOT / 'tools' / 'docs_site.py'}]\nnav: [{{Home: [index.md]}}]\n", encoding="utf-8"
    )
    done = build(tmp_path / "site", config)
    assert done.returncode != 0
    assert "docs/page.md links to missing.md" in done.stdout + done.stderr
