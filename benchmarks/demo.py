"""The live page under a finger and under a crowd: time from a key press to new heatmaps, and 32 clients for a minute.

    python benchmarks/demo.py runs/quickstart/seed-0/clip/model runs/quickstart/seed-0/powerclip/model

Both ask a server of its own, `powerclip demo` as a visitor starts it. A key press is timed in a headless Chromium, from
the input event to the frame that shows the answer. A client of the crowd asks about a caption that nobody asked about
before, waits for the answer and asks again; where it is told that the models are busy it waits as long as it is told.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import RESULTS, markdown, origin, run, write_result

from powerclip.errors import UserError

CAPTIONS = (
    "a large purple star beside a small orange moon",
    "two cats sleep on a sofa under a window",
    "a striped ring above a dotted heart",
)
WORDS = "red blue green star ring heart dog cat chair table under above beside small large striped"
TYPE = """(text) => new Promise((resolve) => {
    const field = document.getElementById("caption");
    const began = performance.now();
    const watch = new MutationObserver(() => {
        if (!document.body.dataset.answered.includes(JSON.stringify(text))) return;
        watch.disconnect();
        requestAnimationFrame(() => resolve(performance.now() - began));
    });
    watch.observe(document.body, { attributes: true, attributeFilter: ["data-answered"] });
    field.value = text;
    field.dispatchEvent(new Event("input"));
})"""


@dataclass(frozen=True)
class Server:
    """A running `powerclip demo`."""

    address: str
    process: int

    def cpu_seconds(self) -> float:
        """The processor time that it has used: what a busy machine does not change."""
        user, system = Path(f"/proc/{self.process}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def mib(self) -> float:
        """Its resident memory."""
        status = Path(f"/proc/{self.process}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


@contextmanager
def served(models: list[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "powerclip", "demo", *models, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+/", line)
        if found is None:
            raise UserError("powerclip demo did not start")
        yield Server(found[0], process.pid)
    finally:
        process.terminate()
        process.wait()


def type_captions(server: Server, captions: tuple[str, ...]) -> list[float]:
    """Milliseconds from each key press to its heatmaps; a character at a time."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise UserError("no Chromium: apt-get install chromium, or leave key presses out with --keys 0")
    times = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-background-networking"]
        )
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("body[data-answered]")
        for caption in captions:
            for length in range(1, len(caption) + 1):
                if caption[:length].endswith(" "):
                    continue  # asks the same again
                times.append(float(page.evaluate(TYPE, caption[:length])))
        browser.close()
    return times


async def crowd(server: Server, clients: int, seconds: float) -> dict[str, Any]:
    import httpx

    words = WORDS.split()
    statuses: Counter[int] = Counter()
    times: list[float] = []
    memory: list[float] = []
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=server.address, timeout=120) as session:
            while time.monotonic() < end:
                caption = f"a {' a '.join(rng.choices(words, k=6))}"
                picture = f"scene-{rng.randint(1, 4)}"
                began = time.monotonic()
                answer = await session.post("/api/ground", json={"picture": picture, "captions": [caption]})
                statuses[answer.status_code] += 1
                if answer.status_code == 503:
                    await asyncio.sleep(float(answer.headers["Retry-After"]) * rng.uniform(0.5, 1))
                else:
                    times.append(1000 * (time.monotonic() - began))

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(server.mib())
            await asyncio.sleep(seconds / 20)

    await asyncio.gather(watch(), *(client(number) for number in range(clients)))
    return {
        "clients": clients,
        "seconds": seconds,
        "answers": statuses[200],
        "busy": statuses[503],
        "errors": sum(count for status, count in statuses.items() if status not in (200, 503)),
        **spread_of(times),
        "MiB after a quarter": round(memory[len(memory) // 4]),
        "MiB at the end": round(memory[-1]),
        "load average": round(os.getloadavg()[0], 1),
    }


def spread_of(times: list[float]) -> dict[str, float]:
    hundredths = statistics.quantiles(times, n=100) if len(times) > 1 else times * 99
    return {
        "median ms": round(statistics.median(times)),
        "p95 ms": round(hundredths[94]),
        "highest ms": round(max(times)),
    }


def tiny_model(folder: Path) -> str:
    import torch

    from powerclip.encoders import build, save

    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    vision = {"image_size": 32, "patch_size": 8, "head_width": 16, **tower}
    text = {"context_length": 32, "vocab_size": 49408, "heads": 2, **tower}
    return str(save(build(config={"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}), folder / "tiny"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="side by side on the page")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--keys", type=int, default=len(CAPTIONS), help="captions to type in a browser; 0: no browser")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: a random model, 2 clients for a second")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    with tempfile.TemporaryDirectory() as folder:
        models, clients, seconds = options.models, options.clients, options.seconds
        if options.tiny:
            models, clients, seconds = [tiny_model(Path(folder))], 2, 1.0
        data: dict[str, Any] = {}
        with served(models) as server:
            if options.keys:
                before = server.cpu_seconds()
                times = type_captions(server, CAPTIONS[: options.keys])
                spent = 1000 * (server.cpu_seconds() - before) / len(times)
                data["keys"] = {"key presses": len(times), **spread_of(times), "server CPU ms": round(spent)}
                data["keys"]["load average"] = round(os.getloadavg()[0], 1)
            data["crowd"] = asyncio.run(crowd(server, clients, seconds))
    parts = []
    for title, name in (("From a key press to new heatmaps", "keys"), ("A crowd", "crowd")):
        if name in data:
            parts.append(f"{title}:\n\n{markdown([list(data[name].values())], list(data[name]))}")
    text = "\n\n".join(parts)
    print(text)
    write_result(options.output, "demo-cpu", origin(), data, text)


if __name__ == "__main__":
    run(main)
