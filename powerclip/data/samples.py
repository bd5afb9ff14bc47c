"""The samples of one shard, by number: images and captions as bytes and texts, from a tar or from a part of a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from powerclip.data.captions import is_text, read_captions
from powerclip.data.faults import BadSample, Fault
from powerclip.data.tar_index import Extent, TarIndex


class Samples(Protocol):
    """What training and annotation read of a shard; a `BadSample` where one cannot be used."""

    @property
    def keys(self) -> Sequence[str]:
        """What each sample is called in this shard."""
        ...

    @property
    def fingerprint(self) -> str:
        """What a sidecar says that was made for the shard as it is; other ones are checked sample by sample."""
        ...

    def captions(self, number: int) -> list[str]:
        """The captions of a sample, at least one."""
        ...

    def image(self, number: int) -> bytes:
        """The file of a sample's image."""
        ...

    def close(self) -> None:
        """Nothing is read any more."""
        ...


class TarSamples:
    """The samples of an open tar, each read where its index says."""

    def __init__(self, tar: Path, index: TarIndex):
        self.index = index
        self._file = os.open(tar, os.O_RDONLY)

    @property
    def keys(self) -> Sequence[str]:
        """The names of the samples' members, up to the first dot."""
        return self.index.keys

    @property
    def fingerprint(self) -> str:
        """Size and time of the tar."""
        return f"{self.index.info.size}:{self.index.info.mtime_ns}"

    def captions(self, number: int) -> list[str]:
        """The captions of a sample: those of its first file that has one.

        Raises:
            BadSample: there is none, or none that is text.
        """
        binary = False
        for extent, suffix in self.index.caption_files(number):
            data = self._read(extent)
            captions = [text for text in read_captions(data, suffix) if is_text(text)] if _decodes(data) else []
            if captions:
                return captions
            binary = binary or not _decodes(data)
        if binary:
            raise BadSample(Fault.BINARY_CAPTION, "its caption is not text")
        raise BadSample(Fault.NO_CAPTION, "its caption is blank")

    def image(self, number: int) -> bytes:
        """The image of a sample.

        Raises:
            BadSample: it is not there any more.
        """
        return self._read(self.index.image(number))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read(self, extent: Extent) -> bytes:
        try:
            data = os.pread(self._file, extent.size, extent.offset)
        except OSError as error:
            raise BadSample(Fault.LOST, f"the tar cannot be read ({error.strerror})") from None
        if len(data) < extent.size:
            raise BadSample(Fault.LOST, "the tar has become shorter since it was indexed")
        return data


def _decodes(data: bytes) -> bool:
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False
