"""What the page asks of the models: several questions at once, each tower run once for all that is new in them.

A question is a few pictures, a few captions and the settings of `powerclip.ground`; its answer has a `Grounding` for
each picture, caption and model. Pictures that were seen, captions that were read and pieces that were found are kept
for a while, so that a key press costs the text towers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from powerclip.annotate.segmenters import Segmenter, load_segmenter
from powerclip.data.trees import Tree
from powerclip.demo.pictures import PictureStore, Recent
from powerclip.errors import UserError
from powerclip.evaluate.ground import (
    Grounding,
    GroundingModel,
    GroundSettings,
    ReadCaption,
    Seen,
    align,
    check_caption,
    parse_captions,
    read,
    see,
)
from powerclip.evaluate.ground_regions import SEGMENTED, find_pieces, region_masks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_KEPT_IMAGES, _KEPT_CAPTIONS = 48, 512


@dataclass(frozen=True)
class Question:
    """Captions to ground in pictures."""

    pictures: tuple[str, ...]  # their ids
    captions: tuple[str, ...]
    settings: GroundSettings


@dataclass(frozen=True)
class Answer:
    """The groundings of a question, by picture, caption and model."""

    groundings: dict[tuple[str, str, str], Grounding]

    def of(self, picture: str, caption: str) -> list[Grounding]:
        """One grounding for each model."""
        return [found for (one, other, _), found in self.groundings.items() if (one, other) == (picture, caption)]


class Engine:
    """Models, pictures and what was computed of them. Used by one thread at a time.

    Args:
        models: with names that differ.
        pictures: what questions name.
        mobile_sam: the weights file of MobileSAM, which makes regions of kind `mobile_sam` possible.
    """

    def __init__(
        self, models: Sequence[GroundingModel], pictures: PictureStore, mobile_sam: Path | None = None
    ) -> None:
        self.models = list(models)
        self.pictures = pictures
        self._segmenters: dict[str, Segmenter] = {"superpixels": load_segmenter("superpixels")}
        if mobile_sam is not None:
            self._segmenters["mobile_sam"] = load_segmenter("mobile_sam", "auto", str(mobile_sam))
        self._trees: Recent[str, Tree] = Recent(_KEPT_CAPTIONS)
        self._read: Recent[tuple[str, str], ReadCaption] = Recent(_KEPT_CAPTIONS * len(self.models))
        self._seen: Recent[tuple[str, str], Seen] = Recent(_KEPT_IMAGES * len(self.models))
        self._pieces: Recent[tuple[str, str], Tensor] = Recent(_KEPT_IMAGES)

    @property
    def kinds(self) -> list[str]:
        """The kinds of regions that can be asked for."""
        return ["random", *self._segmenters, "boxes"]

    def answer(self, questions: Sequence[Question]) -> list[Answer | UserError]:
        """The answers, in order; a question that cannot be answered has the reason instead, and stops no other."""
        results: list[Answer | UserError] = []
        seen, captions = self._prepare(questions)
        for question in questions:
            try:
                results.append(self._answer(question, seen, captions))
            except UserError as error:
                results.append(error)
        return results

    def _prepare(
        self, questions: Sequence[Question]
    ) -> tuple[dict[tuple[str, str], Seen], dict[tuple[str, str], ReadCaption]]:
        """All pictures and captions of the questions, by model: what is new in one batch for each tower."""
        captions = list(dict.fromkeys(caption for question in questions for caption in question.captions))
        pictures = list(dict.fromkeys(picture for question in questions for picture in question.pictures))
        unparsed = [caption for caption in captions if self._trees.get(caption) is None]
        parsed = dict(zip(unparsed, parse_captions(unparsed), strict=True)) if unparsed else {}
        trees = {caption: self._trees.get(caption) or parsed[caption] for caption in captions}
        for caption, tree in parsed.items():
            self._trees.put(caption, tree)
        readable = [caption for caption in captions if trees[caption].nodes]
        images = {}
        for picture in pictures:
            try:
                images[picture] = self.pictures.image(picture)
            except UserError:
                continue  # said to those who asked for it
        all_seen: dict[tuple[str, str], Seen] = {}
        all_read: dict[tuple[str, str], ReadCaption] = {}
        for model in self.models:
            known_seen = {name: self._seen.get((model.name, name)) for name in images}
            new = [name for name, found in known_seen.items() if found is None]
            for name, found in zip(new, see(model, [images[name] for name in new]) if new else [], strict=True):
                known_seen[name] = self._seen.put((model.name, name), found)
            known_read = {caption: self._read.get((model.name, caption)) for caption in readable}
            unread = [caption for caption, found in known_read.items() if found is None]
            texts = read(model, unread, [trees[caption] for caption in unread]) if unread else []
            for caption, text in zip(unread, texts, strict=True):
                known_read[caption] = self._read.put((model.name, caption), text)
            all_seen |= {(model.name, name): found for name, found in known_seen.items() if found is not None}
            all_read |= {(model.name, caption): text for caption, text in known_read.items() if text is not None}
        return all_seen, all_read

    def _answer(
        self,
        question: Question,
        seen: dict[tuple[str, str], Seen],
        captions: dict[tuple[str, str], ReadCaption],
    ) -> Answer:
        kind = question.settings.regions.kind
        if kind in SEGMENTED and kind not in self._segmenters:
            raise UserError(f"regions of kind {kind} need weights: start the page with --mobile-sam mobile_sam.pt")
        groundings = {}
        for picture in question.pictures:
            image = self.pictures.image(picture)  # raises where it is not there
            pieces = None
            if kind in SEGMENTED:
                pieces = self._pieces.get((kind, picture))
                if pieces is None:
                    pieces = self._pieces.put((kind, picture), find_pieces(image, self._segmenters[kind]))
            for model in self.models:
                looked = seen[model.name, picture]
                masks = region_masks(question.settings.regions, looked.view, looked.grid, pieces)
                for caption in question.captions:
                    if (model.name, caption) not in captions:
                        check_caption(caption, Tree((), ()))  # it has no word
                    groundings[picture, caption, model.name] = align(
                        model.name, looked, captions[model.name, caption], masks, question.settings
                    )
        return Answer(groundings)
