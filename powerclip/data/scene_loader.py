"""Batches of embedded scenes: batch number s is a function of the seeds and s alone.

Scenes and captions are drawn as numbers and tokens, by processes ahead of the training where there are several workers
(Python's threads would wait for each other); images are drawn from the numbers on the device that wants them.

Axes: C pairs · M regions · N patches
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from powerclip.alignment.regions import boxes_of
from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.keyed_random import Draw, keys_of
from powerclip.data.loader import WORKER_KILLED, BatchLoader, begin_worker, box_draws
from powerclip.data.pixels import Normaliser
from powerclip.data.scene_captions import PackedCaptions, SceneCaptions
from powerclip.data.scenes import PackedScenes, generate, pack_scenes, render_packed
from powerclip.data.tokens import CaptionTokenizer
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks

_PREFETCHED = 4  # batches that each process has ready


@dataclass(frozen=True)
class _DrawnBatch:
    """A batch before its images are drawn."""

    scenes: PackedScenes
    captions: PackedCaptions
    boxes: Tensor  # [4, C, M] uniform numbers
    keys: list[str]


class _SceneDraw:
    """Draws batches by number; goes to the processes."""

    def __init__(self, spec: BatchSpec, tokenizer: CaptionTokenizer, rows: slice, collective: float) -> None:
        self.spec, self.rows, self._collective = spec, rows, collective
        self._captions = SceneCaptions(tokenizer, spec.nodes, spec.length_multiple)

    def __getitem__(self, step: int) -> _DrawnBatch:
        spec = self.spec
        numbers = range(step * spec.batch_size, (step + 1) * spec.batch_size)[self.rows]
        scenes = [generate(spec.seed, number, self._split(number)) for number in numbers]
        return _DrawnBatch(
            scenes=pack_scenes(scenes),
            captions=self._captions.pack(scenes),
            boxes=box_draws(keys_of(spec.augment_seed, np.array(numbers), Draw.BOXES), spec.regions),
            keys=[f"{scene.split}-{scene.seed}-{scene.index}" for scene in scenes],
        )

    def _split(self, number: int) -> str:
        """The split of a scene: those of the share are spread evenly."""
        share = self._collective
        return "collective" if int((number + 1) * share) > int(number * share) else "train"


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and lists them in `parts`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.parts: list[bytes] = []
        self._size = 0

    def persistent_id(self, value: object) -> tuple[int, torch.dtype, torch.Size] | None:
        """Where in the joined parts a tensor lies."""
        if not isinstance(value, Tensor):
            return None
        start, content = self._size, value.numpy().tobytes()
        self.parts += [content, bytes(-len(content) % 8)]  # a tensor of eight bytes a number begins at a multiple of 8
        self._size += len(content) + len(self.parts[-1])
        return start, value.dtype, value.shape


class _Unpickler(pickle.Unpickler):
    """Puts the tensors in again, as views of their joined bytes."""

    def __init__(self, file: io.BytesIO, joined: Tensor) -> None:
        super().__init__(file)
        self._joined = joined

    def persistent_load(self, place: tuple[int, torch.dtype, torch.Size]) -> Tensor:
        """The tensor that lies there."""
        start, dtype, shape = place
        return self._joined[start : start + dtype.itemsize * shape.numel()].view(dtype).view(shape)


@dataclass(frozen=True)
class _SentDraw:
    """Draws batches for processes to send: as two strings of bytes.

    Torch would send each of the twenty tensors of a batch through a file in shared memory, and copy each to the device.
    """

    draw: _SceneDraw

    def __getitem__(self, step: int) -> tuple[bytes, bytes]:
        content = io.BytesIO()
        pickler = _Pickler(content)
        pickler.dump(self.draw[step])
        return content.getvalue(), b"".join(pickler.parts)


def _as_it_is(sent: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Torch would make a list of the tuple."""
    return sent


def _receive(sent: tuple[bytes, bytes], device: torch.device) -> _DrawnBatch:
    """A batch that was sent, on the device: one copy, which does not wait for what the device is doing."""
    content, joined = sent
    buffer = torch.empty(len(joined), dtype=torch.uint8, pin_memory=device.type == "cuda")
    buffer.numpy()[:] = np.frombuffer(joined, np.uint8)
    drawn: _DrawnBatch = _Unpickler(io.BytesIO(content), buffer.to(device, non_blocking=True)).load()
    return drawn


class SceneLoader(BatchLoader):
    """Scenes of a run, each shown once: step s shows numbers s·C … (s+1)·C-1 of those of the seed.

    Args:
        spec: the batches; scenes are square and shown whole.
        tokenizer: gives the tokens of a caption and their place in it.
        ranks: share each batch.
        collective: share of the scenes that are of split "collective" instead of "train".
    """

    def __init__(self, spec: BatchSpec, tokenizer: CaptionTokenizer, ranks: Ranks = SINGLE, collective: float = 0.0):
        super().__init__(spec, ranks)
        if spec.image_size[0] != spec.image_size[1]:
            size = "×".join(map(str, spec.image_size))
            raise UserError(f"data.source: scenes are square, and the model reads images of {size} pixels")
        self.tokenizer = tokenizer
        self._draw = _SceneDraw(spec, tokenizer, self._rows, collective)
        self._normalise = Normaliser(spec.mean, spec.std, spec.device)

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        return self._finish(self._draw[step])

    def stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches `start` … `stop`-1 in order; by processes where there is more than one worker."""
        if self.spec.workers < 2:
            yield from super().stream(start, stop)
            return
        loader: DataLoader[tuple[bytes, bytes]] = DataLoader(
            _SentDraw(self._draw),  # type: ignore[arg-type]
            sampler=range(start, stop),
            batch_size=None,
            num_workers=self.spec.workers,
            prefetch_factor=_PREFETCHED,
            worker_init_fn=begin_worker,
            collate_fn=_as_it_is,
        )
        try:
            for sent in loader:
                yield self._finish(_receive(sent, self.spec.device))
        except (ConnectionError, EOFError):  # in the middle of a message
            raise UserError(WORKER_KILLED) from None

    def _finish(self, drawn: _DrawnBatch) -> Batch:
        """Draw the images, on the device."""
        spec = self.spec
        images = render_packed(drawn.scenes.to(spec.device), spec.image_size[0]).float()
        return Batch(
            images=self._normalise(images),
            tokens=drawn.captions.tokens.to(spec.device),
            regions=boxes_of(drawn.boxes.to(spec.device), spec.grid, spec.largest_box),
            phrases=drawn.captions.phrases.to(spec.device),
            keys=drawn.keys,
            lengths=drawn.captions.lengths,
        )
