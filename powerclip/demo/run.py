"""`powerclip demo`: find the models, then serve the page or write it as a file."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from powerclip.errors import UserError
from powerclip.evaluate.ground_figure import model_names
from powerclip.runtime.shipped import MODEL

if TYPE_CHECKING:
    from powerclip.demo.engine import Engine

QUICKSTART = Path("runs/quickstart")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class DemoOptions:
    """What the page shows, and where."""

    models: Sequence[str] = ()
    pretrained: str | None = None
    pictures: Path | None = None
    mobile_sam: Path | None = None
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: int = 8000
    open_browser: bool = False


def find_models(quickstart: Path = QUICKSTART) -> list[str]:
    """The quickstart's two models, of its first seed; where there are none, the one that comes with the package."""
    for seed in sorted(quickstart.glob("seed-*")):
        found = [seed / name / "model" for name in ("clip", "powerclip") if (seed / name / "model").is_dir()]
        if found:
            return [str(path) for path in found]
    return [MODEL]


def make_engine(options: DemoOptions) -> Engine:
    """The models and pictures that the options name."""
    # What is cheap to get wrong is looked at before any model is loaded.
    from powerclip.demo.engine import Engine
    from powerclip.demo.pictures import PictureStore
    from powerclip.evaluate.ground import GroundingModel
    from powerclip.runtime.distributed import choose_device

    models = list(options.models or find_models())
    pictures = PictureStore(options.pictures)
    device = str(choose_device(options.device, setting="--device"))
    loaded = [
        GroundingModel.load(model, options.pretrained, device, name)
        for model, name in zip(models, model_names(models), strict=True)
    ]
    return Engine(loaded, pictures, options.mobile_sam)


def needs_server() -> None:
    """UserError when the extra is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError("the page needs a server: pip install 'powerclip[demo]'") from None


def serve(options: DemoOptions) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: the extra is not installed, the port is taken, a model or a folder is not there.
    """
    needs_server()
    import uvicorn

    from powerclip.demo.server import make_app

    bound = bind(options.host, options.port)
    try:
        engine = make_engine(options)
        # On loopback a foreign site could lead its own name here: only ours are answered.
        hosts = [*LOOPBACK[:2], "[::1]"] if options.host in LOOPBACK else None
        shown = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{shown}:{bound.getsockname()[1]}/"
        print(f"{', '.join(model.name for model in engine.models)}: {address} (Ctrl-C stops it)", flush=True)
        if options.open_browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            make_app(engine, hosts=hosts), log_level="warning", timeout_graceful_shutdown=3, limit_concurrency=256
        )
        # Ctrl-C is how the page is closed, not an interruption.
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[bound])
    finally:
        bound.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, before the models are loaded: 0 takes any free port.

    Raises:
        UserError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot serve at {host}, port {port}: {reason}; choose another with --port") from None
    return bound
