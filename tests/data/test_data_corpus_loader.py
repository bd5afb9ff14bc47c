"""Batches of a corpus: epochs without repetition, captions of their images, crops that are where they say."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F

from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.corpus import Corpus, read_corpus
from powerclip.data.corpus_loader import CorpusLoader, pack_corpus, take_phrases
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.data.trees import parse_bracketed
from powerclip.errors import UserError


@pytest.fixture(scope="module")
def tokenizer() -> CaptionTokenizer:
    return CaptionTokenizer()


@pytest.fixture(scope="module")
def corpus(mini_corpus) -> Corpus:
    return read_corpus(sorted(mini_corpus.glob("train-*.tar")), 20, mini_corpus / "trees.tsv")


def loader(corpus: Corpus, tokenizer: CaptionTokenizer, **options: object) -> CorpusLoader:
    spec = BatchSpec(**{"image_size": (16, 16), "grid": (2, 2), "batch_size": 5, "regions": 3} | options)
    return CorpusLoader(pack_corpus(corpus, tokenizer, spec.nodes), spec)


def same(a: Batch, b: Batch) -> bool:
    tensors = [(getattr(a, name), getattr(b, name)) for name in ("images", "tokens", "regions")]
    tensors += [(getattr(a.phrases, f.name), getattr(b.phrases, f.name)) for f in fields(a.phrases)]
    return a.keys == b.keys and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in tensors)


def gradient_images(count: int, size: int) -> torch.Tensor:
    """Images whose first channel says how far right a pixel is and whose second how far down."""
    ramp = (torch.arange(size) + 0.5) / size * 255
    images = torch.zeros(count, 3, size, size)
    images[:, 0], images[:, 1] = ramp, ramp[:, None]
    return images.round().byte()


def plain(images: torch.Tensor) -> Corpus:
    count = len(images)
    tree = parse_bracketed("(NP a dog)", "a dog")
    return Corpus([str(n) for n in range(count)], images, ["a dog"] * count, torch.arange(count), [tree] * count)


def values(images: torch.Tensor) -> torch.Tensor:
    """Normalised pixels as 0 … 255 again."""
    return (images * torch.tensor(CLIP_STD).view(3, 1, 1) + torch.tensor(CLIP_MEAN).view(3, 1, 1)) * 255


def test_every_image_is_shown_once_an_epoch_in_an_order_of_its_own(corpus, tokenizer):
    made = loader(corpus, tokenizer, batch_size=4)
    epochs = [[key for step in range(3) for key in made.batch(3 * epoch + step).keys] for epoch in range(3)]
    assert all(sorted(epoch) == corpus.keys for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_images_that_do_not_fill_a_batch_wait_for_another_epoch(corpus, tokenizer):
    made = loader(corpus, tokenizer, batch_size=5)
    assert made.steps_per_epoch == 2
    keys = [key for step in range(2) for key in made.batch(step).keys]
    assert len(set(keys)) == 10


def test_a_caption_is_one_of_its_image_and_all_are_shown_in_time(corpus, tokenizer):
    made = loader(corpus, tokenizer, batch_size=12)
    owned = {key: set() for key in corpus.keys}
    for caption, owner in zip(corpus.captions, corpus.image_of_caption.tolist(), strict=True):
        owned[corpus.keys[owner]].add(tuple(tokenizer.encode(caption).ids))
    seen = {key: set() for key in corpus.keys}
    for step in range(12):
        batch = made.batch(step)
        for key, row, image in zip(batch.keys, batch.tokens, values(batch.images), strict=True):
            ids = row.tolist()
            end = ids.index(tokenizer.tokenizer.eot_token_id) + 1
            assert not any(ids[end:])
            seen[key].add(tuple(ids[:end]))
            # The images are plain: any crop has the colour.
            colour = corpus.images[corpus.keys.index(key), :, 0, 0]
            assert (image - colour.view(3, 1, 1)).abs().max() < 0.1
    assert seen == owned


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stream_is_the_same_however_many_threads_make_it(corpus, tokenizer, workers):
    made = loader(corpus, tokenizer, workers=workers)
    reference = loader(corpus, tokenizer)
    streamed = list(made.stream(0, 7))
    assert len(streamed) == 7
    assert all(same(batch, reference.batch(step)) for step, batch in enumerate(streamed))


def test_regions_of_a_partition_cover_each_image_once(corpus, tokenizer):
    regions = loader(corpus, tokenizer, drawn="partition").batch(0).regions
    assert (regions.sum(1) == 1).all()


def test_seeds_say_which_images_and_which_parts_of_them(corpus, tokenizer):
    first, order, parts = (
        loader(corpus, tokenizer, batch_size=12, **seeds).batch(0) for seeds in ({}, {"seed": 1}, {"augment_seed": 1})
    )
    assert order.keys != first.keys
    # An image looks the same in whatever order its epoch is.
    rows = [order.keys.index(key) for key in first.keys]
    assert torch.equal(order.images[rows], first.images)
    assert torch.equal(order.regions[rows], first.regions)
    assert parts.keys == first.keys
    assert not torch.equal(parts.regions, first.regions)


def test_the_number_of_regions_changes_neither_captions_nor_crops(corpus, tokenizer):
    few, many = loader(corpus, tokenizer, regions=2).batch(0), loader(corpus, tokenizer, regions=9).batch(0)
    assert torch.equal(few.images, many.images)
    assert torch.equal(few.tokens, many.tokens)


def test_token_rows_are_rounded_up_but_not_beyond_the_context(corpus, tokenizer):
    assert loader(corpus, tokenizer, length_multiple=8).batch(0).tokens.shape[1] in (8, 16)
    batch = loader(corpus, tokenizer, length_multiple=32).batch(0)
    assert batch.tokens.shape[1] == batch.phrases.words.shape[1] == 32
    short = CaptionTokenizer(context_length=9)
    assert loader(corpus, short, batch_size=12, length_multiple=8).batch(0).tokens.shape[1] == 9


def test_a_batch_larger_than_the_corpus_is_refused(corpus, tokenizer):
    with pytest.raises(UserError, match=r"train\.batch_size is 13, but the corpus has only 12"):
        loader(corpus, tokenizer, batch_size=13)


def test_chosen_captions_are_packed_as_if_they_were_alone(corpus, tokenizer):
    packed = pack_corpus(corpus, tokenizer)
    captions = torch.tensor([7, 2, 2, 0, 11])
    tokenized = [tokenizer.encode(corpus.captions[i]) for i in captions.tolist()]
    for length in (13, 16, 40):
        taken = take_phrases(packed.phrases, captions, length)
        direct = pack_phrases([corpus.trees[i] for i in captions.tolist()], tokenized, length)
        for field in fields(direct):
            one, other = getattr(taken, field.name), getattr(direct, field.name)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# ---- crops -----------------------------------------------------------------------------------------------------------


def test_a_crop_of_everything_is_a_plain_resize(tokenizer):
    images = torch.randint(0, 256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    batch = loader(plain(images), tokenizer, batch_size=4, image_size=(24, 20), crop=1.0).batch(0)
    resized = F.interpolate(images.float(), (24, 20), mode="bicubic", align_corners=False).clamp(0, 255)
    expected = resized[[int(key) for key in batch.keys]]
    assert torch.allclose(values(batch.images), expected, atol=1e-2)


def test_a_crop_shows_the_part_of_the_image_that_its_box_says(tokenizer):
    made = loader(plain(gradient_images(3, 64)), tokenizer, batch_size=3)
    boxes = torch.tensor([[0.25, 0.25, 0.75, 0.75], [0.0, 0.625, 0.5, 0.875], [0.25, 0.0, 1.0, 1.0]])
    shown = values(made.crop_images(torch.arange(3), boxes)) / 255
    for image, (left, top, right, bottom) in zip(shown, boxes.tolist(), strict=True):
        across = left + (right - left) * (torch.arange(16) + 0.5) / 16
        down = top + (bottom - top) * (torch.arange(16) + 0.5) / 16
        assert torch.allclose(image[0], across.expand(16, 16), atol=0.01)
        assert torch.allclose(image[1], down[:, None].expand(16, 16), atol=0.01)


def test_sorting_puts_the_same_pairs_in_the_order_of_their_captions_lengths(corpus, tokenizer):
    plain, ordered = (
        loader(corpus, tokenizer, batch_size=10, length_multiple=4, sort_by_length=s).batch(0) for s in (False, True)
    )
    lengths = ordered.tokens.argmax(1) + 1
    assert lengths.tolist() == sorted(lengths.tolist())
    assert ordered.lengths == tuple(lengths.tolist())
    assert plain.lengths == tuple((plain.tokens.argmax(1) + 1).tolist())
    assert plain.short == 0
    assert plain.token_groups is plain.tokens
    rows = [plain.keys.index(key) for key in ordered.keys]
    for name in ("images", "tokens", "regions"):
        assert torch.equal(getattr(ordered, name), getattr(plain, name)[rows])
    nodes = plain.phrases.node_offsets.diff()
    assert torch.equal(ordered.phrases.node_offsets.diff(), nodes[rows])


def test_only_the_longest_eighth_of_the_captions_is_padded_to_the_longest():
    tokens = torch.zeros(16, 24, dtype=torch.long)
    nothing = torch.zeros(16, 0)
    batch = Batch(nothing, tokens, nothing, None, [], short=8)
    short, long = batch.token_groups
    assert short.shape == (14, 8)
    assert long.shape == (2, 24)
    assert batch.padded_length == 10
    assert replace(batch, short=24).token_groups is tokens
