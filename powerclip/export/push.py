"""A model on the Hugging Face hub: what goes there is made in a temporary folder, shown, and sent only when asked to.

The folder holds the model as open_clip reads it (and so `powerclip.load("hf-hub:org/name")`), as a CLIPModel where it
can be one, as ONNX graphs, with their parity measured, and the model card.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from powerclip.encoders import load, save
from powerclip.errors import UserError, first_line
from powerclip.export.card import describe_run, model_card
from powerclip.export.check import Checker, Parity, check_bound
from powerclip.export.folder import CheckOptions, Format, files_of, open_export, write_format
from powerclip.export.onnx import require_onnx
from powerclip.export.processor import require_transformers
from powerclip.export.towers import Precision
from powerclip.runtime.progress import Progress, print_line

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # org/name


@dataclass(frozen=True)
class PushOptions:
    """What goes to the hub, and how."""

    private: bool = False
    dry_run: bool = False  # show what would be sent, send nothing
    onnx: Sequence[Precision] = ("fp32",)  # precisions of the ONNX graphs; none without any
    dense: bool = True  # graphs give patches and words too
    check: CheckOptions = field(default_factory=CheckOptions)
    message: str = "Upload the model"


def push_model(
    source: str | Path,
    repo: str,
    options: PushOptions,
    *,
    confirm: Callable[[], bool] = lambda: True,
    console: Console | None = None,
) -> str | None:
    """Upload the model `source` to the hub as `repo`; the address of the upload, None where nothing was sent.

    Args:
        source: what `powerclip.load` takes.
        repo: `org/name`; it is created if it is not there.
        options: what is sent.
        confirm: asked once, after everything was shown.
        console: where to print; standard output by default.

    Raises:
        UserError: no such model, a difference over the bound, no token, or the hub refuses.
    """
    console = console or Console()
    if not _NAME.fullmatch(repo):
        raise UserError(f"{repo!r} is not the name of a repository on the hub: write org/name")
    require_transformers()
    if options.onnx:
        require_onnx()
    with tempfile.TemporaryDirectory(prefix="powerclip-push-") as temporary:
        folder = Path(temporary)
        fill_folder(source, repo, folder, options, console)
        print_line(console, f"{repo} ({'private' if options.private else 'public'} where it is new):")
        for path, size in files_of(folder):
            print_line(console, f"{size / 1e6:10.1f} MB  {path}")
        if options.dry_run:
            print_line(console, "dry run: nothing was sent")
            return None
        if not confirm():
            print_line(console, "nothing was sent")
            return None
        address = upload(folder, repo, options)
    print_line(console, f"uploaded: {address}")
    print_line(console, f'load it: powerclip.load("hf-hub:{repo}")')
    return address


def fill_folder(source: str | Path, repo: str, folder: Path, options: PushOptions, console: Console) -> None:
    """Write everything that `repo` will hold into `folder`, measured and described."""
    model, preprocess, tokenizer = load(source)
    model = model.eval()
    checker = Checker(model, preprocess, tokenizer, options.check.read(model))
    save(model, folder, tokenizer)
    contents, parities = ["open_clip"], list[Parity]()
    forms: list[tuple[Format, Precision]] = [("hf", "fp32"), *(("onnx", precision) for precision in options.onnx)]
    # The CLIPModel's config.json has the towers' settings that an ONNX folder's leaves out, so it is written last.
    with Progress("export", len(forms), transient=True) as progress:
        for format, precision in reversed(forms):
            try:
                write_format(model, tokenizer, folder, format, precision, dense=options.dense)
            except UserError as error:
                if format != "hf":
                    raise
                progress.warn(f"no CLIPModel for transformers: {error}")
                continue
            parity = checker.measure(open_export(folder, format, precision), format, precision, folder)
            print_line(console, parity.line())
            check_bound(parity, options.check.bound)
            parities.append(parity)
            contents.append(format)
            progress.advance()
    card = model_card(repo, model, describe_run(source), parities, contents=set(contents), dense=options.dense)
    (folder / "README.md").write_text(card, encoding="utf-8")


def upload(folder: Path, repo: str, options: PushOptions) -> str:
    """Create the repository if needed and send the folder as one commit; its address."""
    from huggingface_hub import HfApi

    api = HfApi()

    def send() -> Any:
        address = api.create_repo(repo, private=options.private, exist_ok=True)
        # A repository that is there keeps its visibility: what should be private must not become public that way.
        if options.private and not api.repo_info(repo).private:
            raise UserError(f"{repo} is there and public: nothing was sent; make it private on the hub or name another")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=options.message)
        return address

    try:
        return str(send())
    except UserError:
        raise
    # The hub's client raises its own errors, httpx's, those of its cache and plain ValueErrors.
    except Exception as error:
        advice = "" if api.token or _has_token() else " (log in with `hf auth login`, or set HF_TOKEN)"
        raise UserError(f"could not upload to {repo}: {first_line(error)}{advice}") from error


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
