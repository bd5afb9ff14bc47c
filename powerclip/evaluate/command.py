"""`powerclip evaluate`: from what was typed to a loaded model and its datasets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from powerclip.errors import UserError
from powerclip.evaluate.suite_run import Evaluated, Job, evaluate, jobs_for_paths, jobs_for_suite
from powerclip.evaluate.suites import choose


def evaluate_model(
    model: str,
    paths: Sequence[Path],
    *,
    pretrained: str | None = None,
    suite: str | None = None,
    data: Path | None = None,
    datasets: Sequence[str] = (),
    output: Path | None = None,
    device: str | None = None,
    cache: bool = True,
    again: bool = False,
    quiet: bool = False,
) -> Evaluated:
    """Load the model and evaluate it on the paths, the suite, or both.

    Raises:
        UserError: neither is named, or one of the names is not known.
    """
    # What costs nothing to check is checked before the model is loaded.
    jobs = _jobs(paths, suite, data, datasets)
    target = output or Path("results") / re.sub(r"[^\w.-]+", "-", "-".join(filter(None, [_name(model), pretrained])))

    from powerclip.data.tokens import CaptionTokenizer
    from powerclip.encoders import load

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    encoder, _, tokenizer = load(model, pretrained=pretrained, device=chosen)
    found = evaluate(
        encoder,
        CaptionTokenizer(tokenizer),
        jobs,
        target,
        model=_name(model),
        pretrained=pretrained,
        cache=cache,
        again=again,
        quiet=quiet,
    )
    if not quiet:
        left = [f"{len(part)} {what}" for part, what in ((found.missing, "missing"), (found.failed, "failed")) if part]
        print(f"results: {target}" + (f" ({', '.join(left)})" if left else ""))
    return found


def _jobs(paths: Sequence[Path], suite: str | None, data: Path | None, datasets: Sequence[str]) -> list[Job]:
    if suite is None and (data is not None or datasets):
        raise UserError("--data and --datasets belong to a suite: name it with --suite")
    if suite is None and not paths:
        raise UserError("say what to evaluate on: paths of your own data, or --suite NAME --data FOLDER")
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no file or folder {path}")
    jobs = jobs_for_paths(paths)
    if suite is not None:
        benchmarks = choose(suite, datasets)
        if data is None:
            raise UserError("--suite needs --data, the folder that holds its datasets")
        if not data.is_dir():
            raise UserError(f"--data: there is no folder {data}")
        jobs += jobs_for_suite(benchmarks, data)
    return jobs


def _name(model: str) -> str:
    """A folder's own name, with that of the run around it: most are called `model`."""
    path = Path(model).expanduser()
    if not path.is_dir():
        return model
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name
