"""Batches of scenes as bytes: for worker processes to send, and for a folder that keeps them for other runs.

Torch would send each of the twenty tensors of a batch through a file in shared memory, and copy each to the device.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powerclip import __version__
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.runtime.locks import exclusive

_HEAD = struct.Struct("<Q")  # how many bytes follow before the tensors
_ALIGNED = 8  # a tensor begins at a multiple of the bytes of its numbers

Place = tuple[int, str, tuple[int, ...]]  # where a tensor lies, its type and its shape


def pack(batch: object) -> bytes:
    """Objects of this package that hold tensors of the CPU, as bytes."""
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(batch)
    head = content.getvalue()
    return b"".join([_HEAD.pack(len(head)), head, bytes(-len(head) % _ALIGNED), *pickler.parts])


def unpack(content: bytes, device: torch.device) -> Any:
    """What was packed, its tensors on the device: one copy, which does not wait for what the device is doing."""
    end = _HEAD.size + _HEAD.unpack_from(content)[0]
    joined = np.frombuffer(content, np.uint8)[end + -end % _ALIGNED :]
    buffer = torch.empty(len(joined), dtype=torch.uint8, pin_memory=device.type == "cuda")
    buffer.numpy()[:] = joined
    head = io.BytesIO(content[_HEAD.size : end])
    return _Unpickler(head, buffer.to(device, non_blocking=True)).load()


@dataclass(frozen=True)
class BatchStore:
    """A folder of packed batches, by number. Processes that want the same batch at once make it once.

    Args:
        folder: of all batches, whoever's.
        identity: everything that decides what a batch of a number holds.
    """

    folder: Path
    identity: str

    @property
    def root(self) -> Path:
        """Where the batches of this identity lie."""
        about = f"{__version__} {torch.__version__} {self.identity}"
        return self.folder / "scenes" / hashlib.blake2b(about.encode(), digest_size=12).hexdigest()

    def get(self, number: int, make: Callable[[], bytes]) -> bytes:
        """A batch: read where it was kept, else made and kept.

        Raises:
            UserError: it cannot be written.
        """
        path = self.root / f"{number:08d}"
        with suppress(FileNotFoundError):
            return path.read_bytes()
        with exclusive(path.with_suffix(".lock")):
            with suppress(FileNotFoundError):
                return path.read_bytes()
            content = make()
            try:
                write_atomic(path, content)
            except OSError as error:
                raise UserError(f"data.cache: {path} cannot be written ({error.strerror})") from None
            return content


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and lists their bytes in `parts`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.parts: list[bytes] = []
        self._size = 0

    def persistent_id(self, value: object) -> Place | None:
        """Where in the joined parts a tensor lies."""
        if not isinstance(value, Tensor):
            return None
        start, content = self._size, value.numpy().tobytes()
        self.parts += [content, bytes(-len(content) % _ALIGNED)]
        self._size += len(content) + len(self.parts[-1])
        return start, str(value.dtype).removeprefix("torch."), tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Puts the tensors in again, as views of their joined bytes. Nothing but classes of this package is made."""

    def __init__(self, file: io.BytesIO, joined: Tensor) -> None:
        super().__init__(file)
        self._joined = joined

    def persistent_load(self, place: Place) -> Tensor:
        """The tensor that lies there."""
        start, name, shape = place
        dtype: torch.dtype = getattr(torch, name)
        end = start + dtype.itemsize * torch.Size(shape).numel()
        return self._joined[start:end].view(dtype).view(shape)

    def find_class(self, module: str, name: str) -> Any:
        """A class that a batch is made of."""
        if not module.startswith("powerclip."):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a batch")
        return super().find_class(module, name)
