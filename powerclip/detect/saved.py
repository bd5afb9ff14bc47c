"""A trained detector on disk: the tower as any model, and beside it what was learned, its classes and its exponents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from powerclip.detect.classes import Classes, embed_classes
from powerclip.detect.detector import Detector, HeadConfig
from powerclip.detect.recipe import DetectFolder
from powerclip.encoders import load, save
from powerclip.encoders.transforms import Tokenizer
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic


@dataclass(frozen=True)
class Exponents:
    """How much of a score is the tower's own, 0 to 1: of classes that training showed, and of others."""

    base: float
    novel: float

    def of(self, classes: Classes) -> Tensor:
        """The exponent of each class [K]."""
        return torch.tensor([self.novel if novel else self.base for novel in classes.novel])


@dataclass(frozen=True)
class TrainedDetector:
    """A detector with what it takes to use it."""

    detector: Detector
    tokenizer: Tokenizer
    learned: tuple[str, ...]  # the classes that training showed
    exponents: Exponents

    def classes(self, names: Sequence[str]) -> Classes:
        """Names as classes: base ones are those that training showed."""
        return Classes(tuple(names), tuple(name not in self.learned for name in names))

    def embed(self, classes: Classes) -> Tensor:
        """The text embeddings of classes [K, D]."""
        return embed_classes(self.detector.encoder, self.tokenizer, classes.names)


def is_detector(path: str | Path) -> bool:
    """Whether there is a finished detector in a folder."""
    return DetectFolder(Path(path)).about.is_file()


def save_detector(folder: DetectFolder, trained: TrainedDetector) -> None:
    """Write the tower, what was learned, and what it is, the last file last."""
    save(trained.detector.encoder, folder.model, trained.tokenizer)
    weights = {name: value.detach().cpu().contiguous() for name, value in trained.detector.state_dict().items()}
    write_atomic(folder.weights, safetensors.torch.save(weights))
    about = {
        "config": asdict(trained.detector.config),
        "learned": list(trained.learned),
        "exponents": asdict(trained.exponents),
    }
    write_atomic(folder.about, (json.dumps(about, indent=1, ensure_ascii=False) + "\n").encode())


def load_detector(path: str | Path, device: torch.device | str = "cpu") -> TrainedDetector:
    """The detector in a folder that `powerclip detect train` wrote.

    Raises:
        UserError: there is none, or it is damaged.
    """
    folder = DetectFolder(Path(path))
    if not folder.about.is_file():
        state = "its training is not finished: continue it with --resume" if folder.holds_run() else "no detector here"
        raise UserError(f"{path}: {state}; `powerclip detect train` makes one")
    encoder, _, tokenizer = load(folder.model, device=device)
    try:
        about: dict[str, Any] = json.loads(folder.about.read_text(encoding="utf-8"))
        config, exponents = HeadConfig(**about["config"]), Exponents(**about["exponents"])
        detector = Detector(encoder, config, bf16=torch.device(device).type == "cuda")
        detector.load_state_dict(safetensors.torch.load(folder.weights.read_bytes()))
        learned = tuple(about["learned"])
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{path}: a damaged detector, or one of another version ({error})") from None
    return TrainedDetector(detector.to(device).eval(), tokenizer, learned, exponents)
