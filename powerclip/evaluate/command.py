"""`powerclip evaluate`: from what was typed to a loaded model and its datasets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from powerclip.errors import UserError
from powerclip.evaluate.ranks import device_for, ranks_of_torchrun
from powerclip.evaluate.runner import Evaluated, Job, evaluate, jobs_for_paths, jobs_for_suite
from powerclip.evaluate.suites import choose


def evaluate_model(
    model: str,
    paths: Sequence[Path],
    *,
    pretrained: str | None = None,
    pointing: Sequence[Path] = (),
    suite: str | None = None,
    data: Path | None = None,
    datasets: Sequence[str] = (),
    output: Path | None = None,
    device: str | None = None,
    cache: bool = True,
    again: bool = False,
    quiet: bool = False,
) -> Evaluated:
    """Load the model and evaluate it on the paths, the boxes of `pointing`, the suite, or several of these.

    Under torchrun the processes share the work, see `ranks`.

    Raises:
        UserError: nothing is named, or one of the names is not known.
    """
    with ranks_of_torchrun() as ranks:
        # What costs nothing to check is checked before the model is loaded.
        jobs = ranks.raise_on_all(lambda: _jobs(paths, pointing, suite, data, datasets))
        name = "-".join(filter(None, [_name(model), pretrained]))
        target = output or Path("results") / re.sub(r"[^\w.-]+", "-", name)

        from powerclip.data.tokens import CaptionTokenizer
        from powerclip.encoders import load

        encoder, _, tokenizer = ranks.raise_on_all(
            lambda: load(model, pretrained=pretrained, device=device_for(ranks, device))
        )
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
            ranks=ranks,
        )
        if ranks.is_main and not quiet:
            parts = ((found.missing, "missing"), (found.failed, "failed"))
            left = [f"{len(part)} {what}" for part, what in parts if part]
            print(f"results: {target}" + (f" ({', '.join(left)})" if left else ""))
        return found


def _jobs(
    paths: Sequence[Path], pointing: Sequence[Path], suite: str | None, data: Path | None, datasets: Sequence[str]
) -> list[Job]:
    if suite is None and (data is not None or datasets):
        raise UserError("--data and --datasets belong to a suite: name it with --suite")
    if suite is None and not paths and not pointing:
        raise UserError("say what to evaluate on: paths of your own data, or --suite NAME --data FOLDER")
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no file or folder {path}")
    for path in pointing:
        if not path.is_file():
            raise UserError(f"--pointing: there is no file {path}")
    jobs = jobs_for_paths(paths, pointing)
    if suite is not None:
        benchmarks = choose(suite, datasets)
        if data is None:
            raise UserError("--suite needs --data, the folder that holds its datasets")
        if not data.is_dir():
            raise UserError(f"--data: there is no folder {data}")
        jobs += jobs_for_suite(benchmarks, data)
    return jobs


def _name(model: str) -> str:
    """What results call a model: a folder by its last two names, less the `model` that runs call theirs."""
    path = Path(model).expanduser()
    if not path.is_dir():
        return model
    path = path.resolve()
    path = path.parent if path.name == "model" else path
    return "/".join(path.parts[-2:]).lstrip("/")
