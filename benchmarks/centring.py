"""Does it matter that heatmaps are not centred, as training centres its regions and phrases?

    python benchmarks/centring.py runs/lead/*/seed-0/model --scenes 1000
    python benchmarks/centring.py MODEL… --grounding $POWERCLIP_DATA/grounding/flickr8k-val.jsonl.gz \
        --images $POWERCLIP_DATA/captions10k/val-000.tar

Each model is measured as it is and with the mean patch, the mean word and the mean text of the data subtracted; sets of
boxes are chosen by cosine and, as T2R chooses them, by sum: every box with a positive similarity.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from measure import RESULTS, markdown, origin, run, write_result
from torch import Tensor

from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, load
from powerclip.evaluate.embedder import Embedder, PixelStore, evaluating
from powerclip.evaluate.entities import read_entities
from powerclip.evaluate.scenes import scene_grounding
from powerclip.evaluate.tasks import Grounding

BATCH = 250
COLUMNS = {
    "pointing": "pointing_words",
    "swap, balanced": "swap_words_balanced",
    "alone": "swap_text_balanced",
    "set F1, one": "set_f1_words_single",
    "several": "set_f1_words_several",
    "exact, several": "set_exact_words_several",
}


def main() -> None:
    given = parse_arguments(__doc__)
    rows, found = [], []
    for name, embedder, task in models_on(given):
        for centred, scores in measure(embedder, task):
            rows.append([name, centred, *(f"{100 * scores[key]:.1f}" for key in COLUMNS.values())])
            found.append({"model": name, "as": centred, **scores})
            print(*rows[-1], sep=" · ", flush=True)
    table = markdown(rows, ["%", "", *COLUMNS])
    print(
        table, write_result(given.output, f"centring-{data_name(given)}", origin(), {"runs": found}, table), sep="\n\n"
    )


def parse_arguments(about: str) -> argparse.Namespace:
    """Models, and scenes or phrases with boxes to measure them on."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--scenes", type=int, help="on so many scenes with phrases for several objects")
    data.add_argument("--grounding", type=Path, help="on phrases with boxes")
    parser.add_argument("--images", type=Path, help="their images")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.grounding and not given.images:
        parser.error("--grounding needs --images")
    return given


def models_on(given: argparse.Namespace) -> Iterator[tuple[str, Embedder, Grounding]]:
    """Each model's name, the model, and the phrases to measure it on."""
    pixels = PixelStore()
    for model in given.models:
        encoder, _, tokenizer = load(model)
        embedder = Embedder(encoder, CaptionTokenizer(tokenizer), pixels=pixels)
        size = encoder.image_size[0]
        task = scene_grounding(given.scenes, size) if given.scenes else read_entities(given.grounding, [given.images])
        yield "/".join(Path(model).parts[-3:-1]) or model, embedder, task


def data_name(given: argparse.Namespace) -> str:
    """What the results are called after."""
    return "scenes" if given.scenes else given.grounding.name.split(".")[0]


def measure(embedder: Embedder, task: Grounding) -> Iterator[tuple[str, dict[str, float]]]:
    """The scores as the model is, and centred; sets by cosine and by sum."""
    means = data_means(embedder, task)
    for centred in (False, True):
        with subtracted(embedder.encoder, *means) if centred else evaluating(embedder.encoder):
            for sets in ("cosine", "sum"):
                scores = replace(task, set_score=sets).score(embedder).flat()
                yield (
                    f"{'centred' if centred else 'as it is'}, sets by {sets}",
                    {k: scores[k] for k in COLUMNS.values()},
                )


def data_means(embedder: Embedder, task: Grounding) -> tuple[Tensor, Tensor, Tensor]:
    """The mean patch, the mean word and the mean text [D] of a task's images, captions and phrases."""
    game, encoder = task.phrases, embedder.encoder
    of_images: list[Tensor] = []
    embedder.patches(game.images, lambda numbers, patches: of_images.append(patches.mean(1)))
    captions = sorted(set(game.captions))
    total, count = torch.zeros(encoder.embed_dim), 0
    with evaluating(encoder):
        for start in range(0, len(captions), BATCH):
            ids = [embedder.tokenizer.encode(caption).ids for caption in captions[start : start + BATCH]]
            _, words = encoder.encode_words(embedder.tokenizer.pad(ids))
            for row, own in zip(words, ids, strict=True):
                total += row[1 : len(own) - 1].sum(0)  # without the tokens for start and end of text
                count += len(own) - 2
    phrases = [caption[span.start : span.end] for caption, span in zip(game.captions, game.spans, strict=True)]
    return torch.cat(of_images).mean(0), total / count, embedder.texts(phrases).mean(0)


@contextmanager
def subtracted(encoder: DualEncoder, patch: Tensor, word: Tensor, text: Tensor) -> Iterator[None]:
    """The encoder with means subtracted from its patches, its words and its texts."""
    patches, words, texts = encoder.encode_patches, encoder.encode_words, encoder.encode_text
    changed = {
        "encode_patches": lambda images: (lambda image, dense: (image, dense - patch))(*patches(images)),
        "encode_words": lambda tokens: (lambda whole, dense: (whole, dense - word))(*words(tokens)),
        "encode_text": lambda tokens: texts(tokens) - text,
    }
    encoder.__dict__.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del encoder.__dict__[name]


if __name__ == "__main__":
    run(main)
