"""The server of the page: answers of the typed function, one line for what is wrong, no file but the page's."""

import asyncio
import io
import struct
import threading
import zlib

import pytest

pytest.importorskip("starlette", reason="the page needs the extra demo")
pytest.importorskip("httpx", reason="starlette's test client needs httpx")

from PIL import Image
from starlette.testclient import TestClient
from tiny_demo import CAPTION, tiny_engine

from powerclip.demo.model_queue import ModelQueue
from powerclip.demo.pictures import LONGEST, MOST_BYTES
from powerclip.demo.run import DemoOptions, bind, find_models, make_engine
from powerclip.demo.server import make_app
from powerclip.errors import UserError
from powerclip.evaluate.ground import GroundSettings, ground
from powerclip.evaluate.ground_regions import Regions


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(make_app(engine)) as client:
        yield client


def png(width=40, height=30, colour=(200, 30, 30)):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def bomb(width, height):
    """A PNG of a few bytes whose header promises so many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")
    )


def ask(client, **changes):
    return client.post("/api/ground", json={"picture": "scene-1", "captions": [CAPTION], **changes})


def test_an_answer_is_the_json_of_the_typed_function_for_each_model(client, engine):
    regions = {"kind": "random", "count": 5, "seed": 3, "largest": 0.4}
    answer = ask(client, regions=regions, similarity="sum", aggregation="nla", captions=[CAPTION, "a blue star"]).json()
    settings = GroundSettings(Regions("random", 5, 3, 0.4), "sum", "nla")
    image = engine.pictures.image("scene-1")
    for caption, found in zip([CAPTION, "a blue star"], answer["captions"], strict=True):
        for model, shown in zip(engine.models, found, strict=True):
            expected = ground(model, image, caption, settings).to_json()
            assert shown["model"] == model.name
            assert shown["scores"] == pytest.approx(expected["scores"], abs=2e-4)
            assert [p["best"] for p in shown["phrases"]] == [p["best"] for p in expected["phrases"]]
            assert shown["regions"] == [list(cells) for cells in expected["regions"]]


def test_all_pairs_are_a_matrix_for_each_model(client):
    pictures, captions = ["scene-1", "coffee"], [CAPTION, "a cup", "a cat"]
    answer = client.post("/api/pairs", json={"pictures": pictures, "captions": captions}).json()
    assert [model["model"] for model in answer["models"]] == ["one", "two"]
    for model in answer["models"]:
        assert [len(row) for row in model["score"]] == [2, 2, 2]
    alone = ask(client, captions=["a cat"]).json()["captions"][0][1]["scores"]
    assert answer["models"][1]["score"][2][0] == pytest.approx(alone["score"], abs=2e-4)
    assert answer["models"][1]["clip"][2][0] == pytest.approx(alone["clip"], abs=2e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"captions": []}, "list of 1 to 2"),
        ({"captions": ["x" * 501]}, "500 characters"),
        ({"captions": ["…!"]}, "has no word"),
        ({"captions": "a dog"}, "list"),
        ({"picture": "no-such"}, "no such picture"),
        ({"picture": "../../etc/passwd"}, "no such picture"),
        ({"picture": "upload-000"}, "choose the file again"),
        ({"regions": {"kind": "mobile_sam"}}, "--mobile-sam"),
        ({"regions": {"kind": "boxes", "boxes": [[0, 0, 1]]}}, "left, top, right and bottom"),
        ({"regions": {"count": 40}}, "1 to 12"),
        ({"regions": {"seed": "many"}}, "not a number"),
        ({"regions": []}, "object"),
        ({"similarity": "cosine", "aggregation": "nla"}, "no approximation"),
        ({"similarity": ["sum"]}, "compared by"),
        ({"tau": 0}, "tau"),
    ],
)
def test_a_question_that_cannot_be_answered_gets_one_line(client, changes, message):
    answer = ask(client, **changes)
    assert answer.status_code == 400
    assert message in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b"\xff\xfe", b"[" * 60_000, b'{"picture": "' + b"x" * 70_000 + b'"}']
)
def test_a_body_that_is_no_question_is_refused(client, content):
    answer = client.post("/api/ground", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", "not a picture"),
        (png()[:-30], "not a picture"),
        (bomb(50_000, 50_000), "40 million pixels"),
        (bomb(7_000, 7_000), "40 million pixels"),
        (bomb(600, 600), "not a picture"),
        (b"\x89PNG" + b"\0" * MOST_BYTES, "too much"),
    ],
    ids=["empty", "svg", "cut", "bomb", "large", "short", "bytes"],
)
def test_an_upload_that_is_no_picture_or_too_large_is_refused(client, content, message):
    answer = client.post("/api/pictures", content=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_an_upload_is_known_by_its_hash_and_encoded_anew(client):
    content = png(LONGEST + 300, 40) + b"<script>appended</script>"
    first, again = (client.post("/api/pictures", content=content).json() for _ in range(2))
    assert first == again
    shown = client.get(f"/picture/{first['id']}")
    assert shown.headers["content-type"] == "image/jpeg"
    assert b"script" not in shown.content
    assert Image.open(io.BytesIO(shown.content)).width == LONGEST
    assert ask(client, picture=first["id"]).status_code == 200


def test_one_upload_too_many_is_busy(client, monkeypatch):
    monkeypatch.setattr("powerclip.demo.server.MOST_UPLOADING", 0)
    answer = client.post("/api/pictures", content=png())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_the_page_may_load_nothing_from_elsewhere(client):
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "://" not in page.text.replace("http://www.w3.org", "")
    for name in ("style.css", "app.js", "draw.js"):
        assert client.get(f"/page/{name}").status_code == 200
        # Text from outside is never read as markup.
        assert "innerHTML" not in client.get(f"/page/{name}").text


@pytest.mark.parametrize(
    "path", ["/page/../server.py", "/page/%2e%2e%2fserver.py", "/page/index.html", "/picture/..%2f..%2fx"]
)
def test_no_other_file_is_served(client, path):
    assert client.get(path).status_code in (400, 404)


def test_a_page_on_loopback_answers_to_no_foreign_name(engine):
    with TestClient(make_app(engine, hosts=["127.0.0.1", "localhost"]), base_url="http://evil.example") as client:
        assert client.get("/api/about").status_code == 400
    with TestClient(make_app(engine, hosts=["127.0.0.1"]), base_url="http://127.0.0.1:8000") as client:
        assert client.get("/api/about").status_code == 200


def test_a_folder_shows_its_pictures_and_nothing_that_a_link_leads_to(tmp_path):
    folder, outside = tmp_path / "pictures", tmp_path / "secret.png"
    folder.mkdir()
    outside.write_bytes(png())
    (folder / "a <b>&.png").write_bytes(png())
    (folder / "broken.jpg").write_bytes(b"nothing")
    (folder / "notes.txt").write_text("no picture")
    (folder / "link.png").symlink_to(outside)
    with TestClient(make_app(tiny_engine(folder))) as client:
        pictures = client.get("/api/about").json()["pictures"]
        assert [one["title"] for one in pictures if one["source"] == "folder"] == ["a <b>&.png", "broken.jpg"]
        assert client.get(f"/picture/{pictures[0]['id']}").status_code == 200
        assert "not a picture" in client.get(f"/picture/{pictures[1]['id']}").json()["error"]


def test_questions_that_wait_are_answered_together_and_one_too_many_is_busy(engine, monkeypatch):
    started, go = threading.Event(), threading.Event()
    batches = []
    answer = engine.answer

    def slow(questions):
        batches.append(len(questions))
        started.set()
        go.wait(60)
        return answer(questions)

    monkeypatch.setattr(engine, "answer", slow)
    queue = ModelQueue(engine, most_waiting=3, most_at_once=8)
    with TestClient(make_app(engine, queue=queue)) as client:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(ask(client).status_code)) for _ in range(4)]
        threads[0].start()
        assert started.wait(60)
        for thread in threads[1:]:
            thread.start()
        while queue._waiting.qsize() < 3:
            threading.Event().wait(0.01)
        refused = ask(client)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        go.set()
        for thread in threads:
            thread.join(60)
    assert answers == [200] * 4
    assert batches == [1, 3]


def test_a_bug_is_told_to_those_who_wait_and_the_next_is_answered(engine, monkeypatch):
    from powerclip.demo.engine import Question

    answer, calls = engine.answer, []

    def fails_once(questions):
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        return answer(questions)

    monkeypatch.setattr(engine, "answer", fails_once)

    async def both():
        queue = ModelQueue(engine)
        question = Question(("scene-1",), (CAPTION,), GroundSettings())
        with pytest.raises(ZeroDivisionError):
            await queue.ask(question)
        found = await queue.ask(question)
        await queue.close()
        return found

    assert len(asyncio.run(both()).groundings) == 2


def test_one_batch_runs_each_tower_once_for_what_is_new(engine, monkeypatch):
    from powerclip.demo import engine as module
    from powerclip.demo.engine import Question

    calls = []

    def counted(name, original):
        def call(model, items, *rest):
            calls.append((name, len(items)))
            return original(model, items, *rest)

        return call

    for name in ("see", "read"):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    fresh = tiny_engine()
    questions = [
        Question(("scene-2", "scene-3"), (caption,), GroundSettings()) for caption in ("a cat", "a dog", "a cat")
    ]
    assert all(not isinstance(found, UserError) for found in fresh.answer(questions))
    assert calls == [("see", 2), ("read", 2)] * 2
    calls.clear()
    fresh.answer(questions)
    assert calls == []


def test_without_models_the_quickstarts_are_taken_and_else_that_of_the_package(tmp_path):
    assert find_models(tmp_path) == ["powerclip-scenes"]
    (tmp_path / "seed-0" / "powerclip" / "model").mkdir(parents=True)
    assert find_models(tmp_path) == [str(tmp_path / "seed-0" / "powerclip" / "model")]
    with pytest.raises(UserError, match="no folder"):
        make_engine(DemoOptions(models=["no-such-model"], pictures=tmp_path / "missing"))


def test_a_port_that_is_taken_is_one_line():
    first = bind("127.0.0.1", 0)
    first.listen()
    try:
        with pytest.raises(UserError, match="--port"):
            bind("127.0.0.1", first.getsockname()[1])
    finally:
        first.close()
