"""The page in a real browser: a headless Chromium types, hovers, clicks, draws, uploads and comes back later."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright", reason="the page is tested with playwright")
pytest.importorskip("starlette", reason="the page needs the extra demo")
pytest.importorskip("uvicorn", reason="the page needs the extra demo")

import uvicorn
from PIL import Image
from playwright import sync_api
from tiny_demo import CAPTION, tiny_engine

from powerclip.demo.export import saved_examples, standalone
from powerclip.demo.run import bind
from powerclip.demo.server import make_app

PATIENCE = 120_000  # ms: a condition is awaited, however slow the machine


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


@pytest.fixture(scope="module")
def address(engine):
    socket = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(engine), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    yield f"http://127.0.0.1:{socket.getsockname()[1]}/"
    server.should_exit = True
    thread.join(60)
    socket.close()


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-gpu"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser):
    context = browser.new_context(viewport={"width": 900, "height": 900}, accept_downloads=True)
    context.set_default_timeout(PATIENCE)
    yield context
    context.close()


@pytest.fixture
def page(context):
    page = context.new_page()
    page.requested, page.problems = [], []
    page.on("request", lambda request: page.requested.append(request.url))
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    yield page
    page.close()


def open_page(page, address):
    page.goto(address)
    page.wait_for_selector("body[data-answered]")


def answered(page, *parts):
    """Wait until the page shows the answer to a question whose JSON has these parts."""
    selector = "".join(f"[data-answered*={json.dumps(part)}]" for part in parts)
    page.wait_for_selector(f"body{selector}", state="attached")


def write(page, caption, field="#caption"):
    page.fill(field, caption)
    # The attribute is JSON; the answer that is shown is the one to this caption.
    page.wait_for_selector(
        f"body[data-answered*={json.dumps(json.dumps(caption, ensure_ascii=False))}]", state="attached"
    )


def pictures(page):
    """What the canvases show, one for each model."""
    return page.eval_on_selector_all("#panels canvas", "all => all.map((canvas) => canvas.toDataURL())")


def chips(page, row=0):
    return page.query_selector_all(f"#tree-{row} .chip")


def test_each_phrase_that_the_pointer_is_on_has_a_heatmap_of_its_own_without_a_round_trip(page, address):
    open_page(page, address)
    write(page, CAPTION)
    page.keyboard.press("Escape")  # nothing is pinned
    assert len(chips(page)) == 4  # the caption, a red star, above a blue ring, a blue ring
    asked = len(page.requested)
    seen = [pictures(page)]
    # A chip's own words lie beside the chips inside of it: the corner with its label is always its own.
    for chip in chips(page):
        chip.hover(position={"x": 4, "y": 4})
        seen.append(pictures(page))
    for model in range(2):
        assert len({shown[model] for shown in seen}) == 5
    assert all(one != two for one, two in seen[1:])
    assert len(page.requested) == asked
    assert page.problems == []


def test_a_click_draws_the_set_that_the_server_answered(page, address):
    open_page(page, address)
    with page.expect_response("**/api/ground") as response:
        write(page, "a red star above a blue ring.")
    answer = response.value.json()["captions"][0]
    page.keyboard.press("Escape")
    page.click('#tree-0 [data-phrase="1"]')
    page.mouse.move(0, 0)
    for number, model in enumerate(answer):
        phrase = model["phrases"][1]
        figure = page.query_selector_all("#panels figure")[number]
        assert [int(badge.inner_text()) - 1 for badge in figure.query_selector_all(".badge")] == phrase["best"]
        assert figure.query_selector(".sum b").inner_text() == f"{phrase['score']:.2f}"
        # The colour of a region is on the canvas where it belongs to the set, and only there.
        found = figure.query_selector("canvas").evaluate("""(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const colours = new Set();
            for (let at = 0; at < data.length; at += 4) {
                colours.add(data[at] * 65536 + data[at + 1] * 256 + data[at + 2]);
            }
            return PC.regionColours.map((colour) => colours.has(parseInt(colour.slice(1), 16)));
        }""")
        assert found == [colour in {region % 8 for region in phrase["best"]} for colour in range(8)]


def test_the_keyboard_does_what_the_mouse_does(page, address):
    open_page(page, address)
    write(page, CAPTION)
    page.keyboard.press("Escape")
    page.focus("#caption")
    before = pictures(page)
    page.keyboard.press("Tab")  # the whole caption
    page.keyboard.press("Tab")
    assert pictures(page) != before
    page.keyboard.press("Enter")
    assert page.get_attribute('#tree-0 [data-phrase="1"]', "aria-selected") == "true"
    assert "phrase=1" in page.url
    assert len(page.query_selector_all("#panels .sum")) == 2


def test_the_address_restores_the_view_and_nothing_leaves_the_machine(page, context, address):
    open_page(page, address)
    page.click('[data-picture="coffee"]')
    write(page, "a cup of coffee on a table")
    page.click("#compare")
    write(page, "a cup of tea on a table", "#second")
    page.click('#settings [data-choice="sum"]')
    page.click("#turn")
    answered(page, '"seed":1', '"similarity":"sum"')
    page.keyboard.press("Escape")
    page.click('#tree-0 [data-phrase="1"]')
    page.mouse.move(0, 0)
    page.focus("#save-png")
    other = context.new_page()
    open_page(other, page.url)
    other.wait_for_selector("#panels .sum")
    assert other.input_value("#second") == "a cup of tea on a table"
    assert other.get_attribute('#settings [data-choice="sum"]', "aria-pressed") == "true"
    assert other.query_selector("#moved-table").inner_text() == page.query_selector("#moved-table").inner_text()
    assert pictures(other) == pictures(page)
    other.close()
    addresses = [urlsplit(url) for url in page.requested]
    assert {url.hostname for url in addresses if url.scheme not in ("data", "blob")} == {"127.0.0.1"}
    assert page.problems == []


def test_a_bad_file_is_answered_with_a_clear_line_and_a_good_one_is_shown(page, address, tmp_path):
    open_page(page, address)
    bad, good = tmp_path / "bad.jpg", tmp_path / "good.png"
    bad.write_bytes(b"not a picture")
    Image.new("RGB", (60, 40), (10, 120, 200)).save(good)
    page.set_input_files("#file", bad)
    page.wait_for_selector("#status.bad")
    assert "not a picture that can be read" in page.inner_text("#status")
    page.set_input_files("#file", good)
    answered(page, "upload-")
    assert "picture=upload-" in page.url
    assert page.inner_text("#status") == ""


def test_a_hostile_caption_is_text(page, address):
    open_page(page, address)
    hostile = "<img src=x onerror=document.title='hacked'> a dog"
    write(page, hostile)
    assert "onerror" in page.inner_text("#tree-0")
    assert page.query_selector("#tree-0 img") is None
    assert page.title() != "hacked"


def test_boxes_drawn_with_the_mouse_are_the_regions(page, address):
    open_page(page, address)
    write(page, CAPTION)
    page.click('#settings [data-choice="boxes"]')
    page.wait_for_selector("figure.drawing canvas")
    canvas = page.query_selector("figure.drawing canvas")
    canvas.scroll_into_view_if_needed()
    area = canvas.bounding_box()

    def at(x, y):
        return area["x"] + x * area["width"], area["y"] + y * area["height"]

    page.mouse.move(*at(0.02, 0.02))
    page.mouse.down()
    page.mouse.move(*at(0.3, 0.3))
    with page.expect_response("**/api/ground") as response:
        page.mouse.move(*at(0.49, 0.49))
        page.mouse.up()
    regions = response.value.json()["captions"][0][0]["regions"]
    assert regions == [[0, 1, 4, 5]]  # the upper left quarter of 4 × 4 patches
    answered(page, '"kind":"boxes"')
    assert "boxes=" in page.url


def test_all_pairs_are_shown_and_the_view_can_be_kept(page, address, tmp_path):
    open_page(page, address)
    with page.expect_download() as kept:
        page.click("#save-png")
    kept.value.save_as(tmp_path / "view.png")
    with Image.open(tmp_path / "view.png") as image:
        assert image.width > 1000
    with page.expect_download() as kept:
        page.click("#save-json")
    kept.value.save_as(tmp_path / "numbers.json")
    assert json.loads((tmp_path / "numbers.json").read_text())["captions"][0][1]["model"] == "two"
    page.click("#view-pairs")
    page.wait_for_selector(".matrix td.best")
    assert len(page.query_selector_all(".matrix")) == 4  # CLIP's and PowerCLIP's of both models
    assert len(page.query_selector_all(".matrix td.best")) == 16
    assert page.problems == []


def test_the_exported_page_needs_no_server(page, engine, tmp_path, monkeypatch):
    monkeypatch.setattr("powerclip.demo.export.MOST_EXAMPLES", 2)
    monkeypatch.setattr("powerclip.demo.export.SEEDS", 1)
    path: Path = tmp_path / "index.html"
    path.write_text(standalone(saved_examples(engine)), encoding="utf-8")
    open_page(page, path.as_uri())
    first = pictures(page)
    page.click('[data-picture="scene-2"]')
    answered(page, "scene-2")
    assert pictures(page) != first
    page.click('#settings [data-choice="mean"]')
    answered(page, '"mean"')
    page.click("#view-pairs")
    page.wait_for_selector(".matrix td.best")
    assert {urlsplit(url).scheme for url in page.requested} <= {"file", "data", "blob"}
    assert page.problems == []
