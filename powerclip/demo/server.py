"""The server of the page: Starlette routes over the queue of the models. It writes nothing to a disk.

    GET  /                   the page
    GET  /page/FILE          its style and scripts
    GET  /api/about          models, pictures, kinds of regions, limits
    GET  /picture/ID         a picture, and /thumbnail/ID a small one
    POST /api/pictures       an upload, the file as the body → its id
    POST /api/ground         {"picture", "captions", …settings} → a grounding for each caption and model
    POST /api/pairs          {"pictures", "captions", …settings} → matrices of scores for each model

What a visitor got wrong is answered with 400 and one line, too many questions with 503 and Retry-After.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from powerclip import __version__
from powerclip.demo.engine import Answer, Engine, Question
from powerclip.demo.model_queue import Busy, ModelQueue
from powerclip.demo.pictures import LONGEST, MOST_BYTES, THUMBNAIL, Picture
from powerclip.errors import UserError
from powerclip.evaluate.ground import GroundSettings
from powerclip.evaluate.ground_regions import Regions
from powerclip.evaluate.region_sets import AGGREGATIONS, MOST_REGIONS, SIMILARITIES

MOST_CHARACTERS = 500  # of a caption
MOST_CAPTIONS, MOST_PICTURES = 6, 6  # of all pairs
MOST_JSON = 64 * 2**10  # bytes of a question
MOST_UPLOADING = 4  # uploads on their way or being decoded
UPLOAD_SECONDS = 60
RETRY_SECONDS = 1

# Scripts and styles from this server alone, nothing inline, no connection elsewhere.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
SCRIPTS = ("scale.js", "state.js", "draw.js", "tree.js", "pairs.js", "app.js")
PAGE_FILES = {"style.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}

Handler = Callable[[Request], Awaitable[Response]]


def page_file(name: str) -> bytes:
    """A file of the page."""
    return (resources.files("powerclip.demo") / "page" / name).read_bytes()


def about(engine: Engine) -> dict[str, Any]:
    """What the page needs to know before it asks anything."""
    return {
        "version": __version__,
        "models": [model.name for model in engine.models],
        "pictures": [describe(picture) for picture in engine.pictures.listed],
        "regions": engine.kinds,
        "similarities": list(SIMILARITIES),
        "aggregations": list(AGGREGATIONS),
        "limits": {
            "bytes": MOST_BYTES,
            "regions": MOST_REGIONS,
            "characters": MOST_CHARACTERS,
            "captions": MOST_CAPTIONS,
            "pictures": MOST_PICTURES,
        },
    }


def describe(picture: Picture) -> dict[str, str]:
    """A picture for the page."""
    return {
        "id": picture.id,
        "title": picture.title,
        "caption": picture.caption,
        "second": picture.second,
        "source": picture.source,
    }


def make_app(
    engine: Engine, *, hosts: list[str] | None = None, frame_ancestors: str = "'none'", queue: ModelQueue | None = None
) -> Starlette:
    """The page as an ASGI app.

    Args:
        engine: the models and pictures.
        hosts: names under which the page may be asked for; with some, a foreign site cannot reach a page on loopback
            through a name of its own.
        frame_ancestors: who may show the page in a frame.
        queue: the queue before the engine.
    """
    server = _Server(engine, queue or ModelQueue(engine))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await server.queue.close()

    routes = [
        Route("/", server.page),
        Route("/page/{name}", server.file),
        Route("/api/about", _answered(server.about)),
        Route("/picture/{name}", _answered(server.picture)),
        Route("/thumbnail/{name}", _answered(server.thumbnail)),
        Route("/api/pictures", _answered(server.upload), methods=["POST"]),
        Route("/api/ground", _answered(server.ground), methods=["POST"]),
        Route("/api/pairs", _answered(server.pairs), methods=["POST"]),
    ]
    middleware = [
        Middleware(_Headers, policy=f"{CONTENT_POLICY}; frame-ancestors {frame_ancestors}"),
        Middleware(GZipMiddleware, minimum_size=2_000, compresslevel=1),
    ]
    if hosts is not None:
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=hosts))
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan)


class _Server:
    """The handlers of the routes."""

    def __init__(self, engine: Engine, queue: ModelQueue) -> None:
        self.engine = engine
        self.queue = queue
        self._uploading = 0

    async def page(self, request: Request) -> Response:
        return Response(page_file("index.html"), media_type="text/html")

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in PAGE_FILES:
            return PlainTextResponse("not found", 404)
        return Response(page_file(name), media_type=PAGE_FILES[name])

    async def about(self, request: Request) -> Response:
        return _json(about(self.engine))

    async def picture(self, request: Request) -> Response:
        return await self._encoded(request, LONGEST)

    async def thumbnail(self, request: Request) -> Response:
        return await self._encoded(request, THUMBNAIL)

    async def _encoded(self, request: Request, longest: int) -> Response:
        content, media = await asyncio.to_thread(self.engine.pictures.encoded, request.path_params["name"], longest)
        return Response(content, media_type=media, headers={"Cache-Control": "private, max-age=3600"})

    async def upload(self, request: Request) -> Response:
        # Counted from its first byte on: so few are in memory at any time, and none may dawdle.
        if self._uploading >= MOST_UPLOADING:
            raise Busy
        self._uploading += 1
        try:
            async with asyncio.timeout(UPLOAD_SECONDS):
                content = await _body(request, MOST_BYTES, f"a picture may have {MOST_BYTES // 2**20} MB")
            picture = await asyncio.to_thread(self.engine.pictures.upload, content)
        except TimeoutError:
            raise UserError(f"the upload took longer than {UPLOAD_SECONDS} seconds") from None
        finally:
            self._uploading -= 1
        return _json(describe(picture))

    async def ground(self, request: Request) -> Response:
        asked = await _asked(request)
        picture = _text(asked, "picture")
        captions = _texts(asked, "captions", 2)
        answer = await self.queue.ask(Question((picture,), captions, read_settings(asked)))
        return _json(
            {
                "picture": picture,
                "captions": [[found.to_json() for found in answer.of(picture, caption)] for caption in captions],
            }
        )

    async def pairs(self, request: Request) -> Response:
        asked = await _asked(request)
        pictures, captions = _texts(asked, "pictures", MOST_PICTURES), _texts(asked, "captions", MOST_CAPTIONS)
        question = Question(pictures, captions, read_settings(asked))
        answer = await self.queue.ask(question)
        matrices = pair_matrices(answer, question, [model.name for model in self.engine.models])
        return _json({"pictures": pictures, "captions": captions, "models": matrices})


def pair_matrices(answer: Answer, question: Question, models: Sequence[str]) -> list[dict[str, Any]]:
    """The scores of all pairs: for each model, CLIP's and PowerCLIP's as rows of captions and columns of pictures."""

    def matrix(model: str, score: str) -> list[list[float]]:
        return [
            [round(getattr(answer.groundings[picture, caption, model], score), 5) for picture in question.pictures]
            for caption in question.captions
        ]

    return [{"model": model, "clip": matrix(model, "clip"), "score": matrix(model, "score")} for model in models]


def read_settings(asked: Mapping[str, Any]) -> GroundSettings:
    """The settings of a question.

    Raises:
        UserError: a value is not of its kind.
    """
    regions = asked.get("regions", {})
    if not isinstance(regions, dict):
        raise UserError("regions are an object with kind, count, seed, largest and boxes")
    boxes = regions.get("boxes", [])
    if not isinstance(boxes, list) or not all(isinstance(box, list) and len(box) == 4 for box in boxes):
        raise UserError("boxes are lists of left, top, right and bottom")
    return GroundSettings(
        Regions(
            kind=regions.get("kind", "random"),
            count=int(_number(regions, "count", 10)),
            seed=int(_number(regions, "seed", 0)),
            largest=_number(regions, "largest", 0.5),
            boxes=tuple(tuple(_finite(side, "a box") for side in box) for box in boxes),  # type: ignore[misc]
        ),
        similarity=asked.get("similarity", "cosine"),
        aggregation=asked.get("aggregation", "exact"),
        centre=asked.get("centre", "none"),
        tau=_number(asked, "tau", 0.001),
    )


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    return _finite(values.get(key, default), key)


def _finite(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{what} has something that is not a number")
    return float(value)


def _text(asked: Mapping[str, Any], key: str) -> str:
    value = asked.get(key)
    if not isinstance(value, str) or not value or len(value) > MOST_CHARACTERS:
        raise UserError(f"{key} is missing, or longer than {MOST_CHARACTERS} characters")
    return value


def _texts(asked: Mapping[str, Any], key: str, most: int) -> tuple[str, ...]:
    values = asked.get(key)
    if not isinstance(values, list) or not 1 <= len(values) <= most:
        raise UserError(f"{key} is a list of 1 to {most}")
    return tuple(dict.fromkeys(_text({key: value}, key) for value in values))


async def _asked(request: Request) -> dict[str, Any]:
    content = await _body(request, MOST_JSON, f"a question may have {MOST_JSON // 2**10} kB")
    try:
        asked = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError("the question is not JSON") from None
    if not isinstance(asked, dict):
        raise UserError("the question is not an object")
    return asked


async def _body(request: Request, most: int, limit: str) -> bytes:
    """The body, of which no more is kept than is allowed, whatever its header says."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise UserError(f"this is too much: {limit}")
        parts.append(part)
    return b"".join(parts)


def _answered(handler: Handler) -> Handler:
    """A handler whose errors are answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except UserError as error:
            return _json({"error": str(error)}, 400)
        except Busy:
            message = {"error": "the models are busy: ask again in a moment"}
            return _json(message, 503, {"Retry-After": str(RETRY_SECONDS)})
        except ClientDisconnect:
            return PlainTextResponse("gone", 499)

    return answered


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone half of a surrogate pair, which JSON can carry and UTF-8 cannot, is answered as a question mark.
    return Response(text.encode("utf-8", "replace"), status, headers, "application/json")


class _Headers:
    """What browsers are told with every answer: nothing from elsewhere, nothing guessed, nothing passed on."""

    def __init__(self, app: ASGIApp, policy: str) -> None:
        self._app = app
        self._headers = [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
