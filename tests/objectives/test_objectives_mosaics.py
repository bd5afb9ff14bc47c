"""Mosaics: images shrunk into tiles, the losses against loops, texts that are mixed of several captions."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny_batches import CONFIG, GRID, tiny_batch, tiny_encoder, tiny_loader
from torch.nn.functional import cosine_similarity, log_softmax, normalize

from powerclip.alignment.config import AlignmentConfig
from powerclip.data.batch import Batch
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.data.trees import parse_bracketed
from powerclip.encoders import build
from powerclip.errors import UserError
from powerclip.objectives import PowerClip
from powerclip.objectives.mosaic_texts import draws_of_a_text, further_texts
from powerclip.objectives.mosaics import (
    MosaicFeatures,
    check_rows,
    competing,
    find_tile_loss,
    glue,
    holds_all_words,
    in_mosaics,
    seam_cells,
    set_loss,
    tile_logits,
    tile_masks,
)
from powerclip.train.towers import Towers


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


# ---- images ----------------------------------------------------------------------------------------------------------


def shrink(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[3, H, W] → [3, height, width]: each pixel is cut into height × width, and blocks of H × W are averaged."""
    fine = image.repeat_interleave(height, 1).repeat_interleave(width, 2)
    return fine.unflatten(1, (height, -1)).unflatten(3, (width, -1)).mean((2, 4))


@pytest.mark.parametrize("cut", [(4, 4), (2, 5), (6, 3)])
def test_a_mosaic_shows_each_image_shrunk_into_its_tile(cut):
    images = rand(1, 4, 3, 16, 24)
    row, column = 2 * cut[0], 3 * cut[1]
    top = [shrink(images[0, 0], row, column), shrink(images[0, 1], row, 24 - column)]
    bottom = [shrink(images[0, 2], 16 - row, column), shrink(images[0, 3], 16 - row, 24 - column)]
    expected = torch.cat([torch.cat(top, 2), torch.cat(bottom, 2)], 1)
    found = glue(images, torch.tensor([cut]), (8, 8))[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_patches_of_a_tile_show_its_image_alone():
    colours = torch.arange(4.0)
    images = colours.view(1, 4, 1, 1, 1).expand(5, 4, 3, 32, 32)
    seams = torch.tensor([[4, 4], [2, 6], [1, 7], [7, 1], [3, 2]])
    patches = glue(images, seams, GRID)[:, 0].unflatten(1, (8, 4)).unflatten(3, (8, 4))  # rows, pixels, columns, pixels
    patches = patches.transpose(2, 3).flatten(3).flatten(1, 2)
    masks = tile_masks(seams, GRID)
    assert torch.equal(masks.sum(1), torch.ones(5, 64, dtype=torch.long))
    for tile in range(4):
        torch.testing.assert_close(patches[masks[:, tile]], torch.full_like(patches[masks[:, tile]], float(tile)))


def test_cuts_lie_evenly_in_the_middle_of_the_grid():
    draws = (torch.arange(1000) + 0.5) / 1000
    assert seam_cells(draws, 14, 0.0).unique().tolist() == [7]
    values, counts = seam_cells(draws, 14, 0.5).unique(return_counts=True)
    assert values.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert counts.min() >= 142
    assert set(seam_cells(draws, 2, 1.0).tolist()) == {1}
    assert set(seam_cells(draws, 7, 0.0).tolist()) <= {3, 4}


def test_the_first_four_of_each_group_of_images_make_a_mosaic():
    numbers = torch.arange(16)
    assert in_mosaics(numbers, 1.0).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert in_mosaics(numbers, 0.5).tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    check_rows(AlignmentConfig(mosaics=0.5), 32, 4)
    with pytest.raises(UserError, match=r"a mosaic of every 8 images.*multiple of 32: each of 4 parts has 6"):
        check_rows(AlignmentConfig(mosaics=0.5), 24, 4)


# ---- losses ----------------------------------------------------------------------------------------------------------


def example(mosaics: int = 2, width: int = 6) -> tuple[MosaicFeatures, torch.Tensor]:
    """Patches of a grid of 4 × 4 with different cuts, and three nodes of each tile's caption."""
    masks = tile_masks(torch.tensor([[2, 2], [1, 3]])[:mosaics], (4, 4))
    return MosaicFeatures(randn(mosaics, 16, width).float(), masks), randn(4 * mosaics, 3, width, seed=1).float()


def test_a_tile_answers_by_its_embedding_or_by_its_best_patches():
    features, nodes = example()
    scale = torch.tensor(5.0)
    mean = features.patches.double().mean((0, 1))
    by_mean, _ = tile_logits(features, nodes, AlignmentConfig(mosaics=1.0), scale)
    by_patches, _ = tile_logits(features, nodes, AlignmentConfig(mosaics=1.0, mosaic_pool="patches"), scale)
    for tile in range(8):
        own = features.patches[tile // 4].double()[features.tiles[tile // 4, tile % 4]] - mean
        for caption in range(8):
            for node in range(3):
                query = nodes[caption, node].double()
                expected = 5 * query @ normalize(own.sum(0), dim=0)
                assert by_mean[caption, node, tile].item() == pytest.approx(expected.item(), abs=1e-4)
                expected = (5 * normalize(own, dim=-1) @ query).logsumexp(0)
                assert by_patches[caption, node, tile].item() == pytest.approx(expected.item(), abs=1e-4)


def test_a_tile_far_below_the_best_has_a_finite_gradient():
    features, _ = example(width=16)
    query = torch.ones(1, 1, 16)
    towards = torch.where(features.tiles[:, :1].mT, 1.0, -1.0)  # the first tile is the query, all others its opposite
    patches = (towards * query).requires_grad_()
    config = AlignmentConfig(mosaics=1.0, mosaic_pool="patches", centre="none")
    logits, _ = tile_logits(
        MosaicFeatures(patches, features.tiles), query.expand(8, 1, -1), config, torch.tensor(100.0)
    )
    loss, _ = find_tile_loss(logits, torch.arange(8)[:, None], torch.ones(8, 1, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(loss, [patches])
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_every_phrase_finds_its_tile_among_those_that_it_could_not_mean():
    logits = randn(8, 3, 8)
    own = torch.arange(8)[:, None].expand(-1, 3)
    real = rand(8, 3, seed=2) < 0.7
    real[:, 0] = True
    also = rand(8, 3, 8, seed=3) < 0.3
    losses, hits = [], []
    for caption in range(8):
        rows = [node for node in range(3) if real[caption, node]]
        of_nodes, of_hits = [], []
        for node in rows:
            kept = [tile for tile in range(8) if tile == caption or not also[caption, node, tile]]
            scores = logits[caption, node, kept]
            of_nodes.append(-log_softmax(scores, 0)[kept.index(caption)].item())
            of_hits.append(kept[int(scores.argmax())] == caption)
        losses.append(sum(of_nodes) / len(rows))
        hits.append(sum(of_hits) / len(rows))
    loss, found = find_tile_loss(logits, own, real, also)
    assert loss.item() == pytest.approx(sum(losses) / 8)
    assert found.item() == pytest.approx(sum(hits) / 8)


def test_among_its_own_a_phrase_sees_the_four_tiles_of_its_mosaic():
    logits = randn(8, 3, 8)
    kept = competing(logits, 0, "own").softmax(-1)
    torch.testing.assert_close(kept[:4, :, :4], logits[:4, :, :4].softmax(-1))
    torch.testing.assert_close(kept[4:, :, 4:], logits[4:, :, 4:].softmax(-1))
    assert kept[:4, :, 4:].max() == 0
    assert torch.equal(competing(logits, 0, "all"), logits)
    # On the second of two ranks the first tile is number 4.
    torch.testing.assert_close(competing(logits[:4], 4, "own").softmax(-1)[..., 4:], logits[:4, :, 4:].softmax(-1))


@pytest.mark.parametrize("pool", ["mean", "patches"])
def test_patches_that_carry_their_whole_image_find_no_tile(pool):
    config = AlignmentConfig(mosaics=1.0, mosaic_pool=pool, mosaic_among="own", centre="none")
    captions = normalize(randn(8, 16), dim=-1).float()
    own = torch.arange(8)[:, None]
    features, _ = example(width=16)
    local = torch.stack([features.tiles[mosaic].float().T @ captions[4 * mosaic :][:4] for mosaic in range(2)])
    leaking = local.mean(1, keepdim=True).expand(-1, 16, -1)
    for patches, best in ((local, 1.0), (leaking, 0.5)):
        logits, _ = tile_logits(MosaicFeatures(patches, features.tiles), captions[:, None], config, torch.tensor(30.0))
        loss, _ = find_tile_loss(competing(logits, 0, "own"), own, torch.ones(8, 1, dtype=torch.bool))
        # What leaks cannot tell four tiles apart; by patches larger tiles are more likely, and the loss is no lower.
        assert (loss < 0.05) if best == 1.0 else (loss >= math.log(4) - 1e-3)


def test_a_phrase_could_be_in_every_tile_whose_caption_has_all_its_words():
    captions = ["a man in a red hat", "two men on a boat", "a red boat", "the man has a hat"]
    tokenizer = clip_tokenizer()
    tokenized = [tokenizer.encode(caption) for caption in captions]
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    words = torch.zeros_like(tokens, dtype=torch.bool)
    for row, caption in enumerate(tokenized):
        words[row, : len(caption)] = torch.tensor(caption.words)
    # "a man", "a red hat"; "two men", "a boat"; all; all
    start = torch.tensor([[1, 4], [1, 4], [1, 1], [1, 1]])
    end = torch.tensor([[3, 7], [3, 6], [4, 4], [6, 6]])
    found = holds_all_words(tokens, words, start, end, tokens, words)
    assert found[0].int().tolist() == [[1, 0, 0, 1], [1, 0, 0, 0]]
    assert found[1].int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 0]]
    assert found[2, 0].int().tolist() == [0, 0, 1, 0]
    assert found[3, 0].int().tolist() == [0, 0, 0, 1]


def test_captions_of_several_tiles_have_these_as_best_set():
    tiles, captions = normalize(randn(3, 4, 8), dim=-1), normalize(randn(3, 4, 8, seed=1), dim=-1)
    sets = [[m for m in range(4) if number >> m & 1] for number in range(1, 16)]
    losses = []
    for mosaic in range(3):
        cosines = torch.stack(
            [
                torch.stack([cosine_similarity(tiles[mosaic, a].sum(0), captions[mosaic, b].sum(0), 0) for b in sets])
                for a in sets
            ]
        )
        for logits in (7 * cosines, 7 * cosines.T):
            losses.append(-log_softmax(logits, 0).diagonal().mean().item())
    loss, _ = set_loss(tiles, captions, torch.tensor(7.0))
    assert loss.item() == pytest.approx(sum(losses) / len(losses))
    gold, found = set_loss(tiles, tiles, torch.tensor(100.0))
    assert found == 1
    assert gold < loss
    same = tiles[:, :1].expand(-1, 4, -1)
    assert set_loss(same, captions, torch.tensor(7.0))[0] >= math.log(15) - 1e-6


# ---- texts -----------------------------------------------------------------------------------------------------------

CAPTIONS = {
    "A dog on a chair .": "(NP (NP A dog) (PP on (NP a chair)) .)",
    "two cats": "(NP two cats)",
    "the small bird sings": "(S (NP the small bird) (VP sings))",
    "a man rides a red horse": "(S (NP a man) (VP rides (NP a red horse)))",
    "it rains": "(S it rains)",
    "a blue car": "(NP a blue car)",
    "some snow on a hill": "(NP (NP some snow) (PP on (NP a hill)))",
    "a cup": "(NP a cup)",
}


@cache
def clip_tokenizer() -> CaptionTokenizer:
    return CaptionTokenizer()


def caption_batch() -> Batch:
    """Two mosaics of captions, without anything else."""
    tokenizer = clip_tokenizer()
    tokenized = [tokenizer.encode(caption) for caption in CAPTIONS]
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    trees = [parse_bracketed(brackets, caption) for caption, brackets in CAPTIONS.items()]
    phrases = pack_phrases(trees, tokenized, tokens.shape[1])
    empty = torch.zeros(len(CAPTIONS), 0)
    return Batch(images=empty, tokens=tokens, regions=empty, phrases=phrases, keys=list(CAPTIONS))


def decoded(tokens: torch.Tensor) -> str:
    """The text between its start and its end."""
    ids = tokens.tolist()
    end = ids.index(max(ids))
    assert ids[0] == max(ids) - 1
    assert not any(ids[end + 1 :])
    return clip_tokenizer().tokenizer.decode(ids[1:end]).strip()


def asked_phrases(batch: Batch, kind: str, exchanged: float, seed: int) -> list[tuple[str, list[tuple[str, int]]]]:
    """Each further text, with the phrases that shall find a tile and the tile."""
    texts = further_texts(batch, 1.0, kind, exchanged, rand(8, *draws_of_a_text(kind), seed=seed))
    found = []
    for row, text in enumerate(texts.tokens):
        phrases = []
        for leaf in range(texts.tile.shape[1]):
            if texts.asked[row, leaf]:
                number = row * texts.tile.shape[1] + leaf
                span = slice(int(texts.phrases.leaf_start[number]), int(texts.phrases.leaf_end[number]))
                assert texts.phrases.words[row, span].all()
                ids = torch.tensor([text[0], *text[span], text.max()])
                phrases.append((decoded(ids), int(texts.tile[row, leaf])))
        found.append((decoded(text), phrases))
    return found


@pytest.mark.parametrize("kind", ["mixed", "alone", "both"])
def test_each_phrase_of_a_further_text_is_of_the_caption_of_its_tile(kind):
    captions, batch = list(CAPTIONS), caption_batch()
    exchanges = 0
    for seed in range(5):
        for row, (text, phrases) in enumerate(asked_phrases(batch, kind, 0.5, seed)):
            for phrase, tile in phrases:
                assert phrase in text
                assert phrase in captions[tile].lower()
                assert tile // 4 == row // 4
                exchanges += tile != row
            if kind == "alone":
                assert [phrase for phrase, _ in phrases] == [text]
                assert phrases[0][1] == row
    assert (exchanges == 0) if kind == "alone" else (exchanges > 4)


def test_of_both_kinds_each_text_is_one():
    batch = caption_batch()
    draws = rand(8, *draws_of_a_text("both"))
    draws[:, -1, 0] = torch.tensor([0.1, 0.9]).double().repeat(4)
    both = further_texts(batch, 1.0, "both", 0.5, draws)
    mixed = further_texts(batch, 1.0, "mixed", 0.5, draws)
    alone = further_texts(batch, 1.0, "alone", 0.5, draws[:, -1, 1:2])
    assert both.alone.tolist() == [True, False] * 4
    assert alone.alone.all()
    assert not mixed.alone.any()
    assert torch.equal(both.tokens[1::2], mixed.tokens[1::2])
    assert torch.equal(both.asked[1::2], mixed.asked[1::2])
    assert torch.equal(both.tokens[::2, : alone.tokens.shape[1]], alone.tokens[::2])
    assert both.asked[::2].sum(1).tolist() == [1] * 4


def test_mixed_captions_without_an_exchange_are_the_captions_without_punctuation():
    found = asked_phrases(caption_batch(), "mixed", 0.0, 0)
    assert [text for text, _ in found] == [caption.lower().removesuffix(" .") for caption in CAPTIONS]
    assert found[0][1] == [("a dog", 0), ("a chair", 0)]


def test_with_every_phrase_exchanged_only_the_words_between_them_stay():
    for text, phrases in asked_phrases(caption_batch(), "mixed", 1.0, 0)[:1]:
        assert " on " in text
        assert "dog" not in text
        assert "chair" not in text
        assert all(tile != 0 for _, tile in phrases)


@pytest.mark.parametrize("kind", ["mixed", "alone", "both"])
def test_texts_of_another_vocabulary_are_the_same_words_though_the_end_of_text_is_not_its_largest_id(kind):
    def other(tokens: torch.Tensor) -> torch.Tensor:
        return torch.where(tokens == 0, 0, 49408 - tokens)  # CLIP's end of text, 49407, becomes 1

    batch, draws = caption_batch(), rand(8, *draws_of_a_text(kind))
    texts = further_texts(batch, 1.0, kind, 0.5, draws)
    found = further_texts(replace(batch, tokens=other(batch.tokens)), 1.0, kind, 0.5, draws)
    assert torch.equal(found.tokens, other(texts.tokens))
    assert torch.equal(found.asked, texts.asked)


# ---- the objective ---------------------------------------------------------------------------------------------------


def terms(objective: PowerClip, encoder, batch: Batch, seed: int = 0):
    towers, generator = Towers(objective, encoder), torch.Generator().manual_seed(seed)
    plan = towers.plan(batch.images, generator)
    batch = towers.with_further_texts(batch, generator)
    further = None if batch.further is None else batch.further.tokens
    return objective.loss(towers(batch.images, batch.tokens, plan, further), batch)


def test_the_total_has_every_part_by_its_weight():
    config = AlignmentConfig(
        mosaics=0.5, mosaic_weight=0.3, mosaic_sets=0.2, mosaic_texts="mixed", mosaic_texts_weight=0.7, weight=0.5
    )
    found = terms(PowerClip(config), tiny_encoder(), tiny_batch(16))
    parts = found.parts
    expected = parts["clip"] + 0.5 * parts["alignment"] + 0.3 * parts["mosaic"] + 0.2 * parts["mosaic_sets"]
    torch.testing.assert_close(found.total.detach(), expected + 0.7 * parts["mosaic_texts"])
    plain = terms(PowerClip(AlignmentConfig(weight=0.5)), tiny_encoder(), tiny_batch(16))
    for name in ("clip", "alignment"):  # the mosaics go through the tower beside the images and change nothing there
        torch.testing.assert_close(parts[name], plain.parts[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("texts", ["mixed", "both"])
def test_phrases_learn_to_find_their_tiles(texts):
    objective = PowerClip(AlignmentConfig(mosaics=1.0, mosaic_texts=texts))
    encoder = tiny_encoder()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *objective.parameters()], lr=3e-3)
    parts = []
    for step in range(16):
        found = terms(objective, encoder, tiny_loader(16).batch(step), step)
        optimizer.zero_grad()
        found.total.backward()
        optimizer.step()
        parts.append({name: float(value) for name, value in found.parts.items()})
    for name in ("mosaic", "mosaic_texts"):
        before, after = (sum(part[name] for part in window) for window in (parts[:4], parts[-4:]))
        assert after < 0.95 * before, name


def test_mixed_texts_want_a_text_tower_that_pads_with_token_0(tmp_path):
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    for padding in (0, 1):
        folder = tmp_path / str(padding)
        transformers.BertConfig(vocab_size=60, pad_token_id=padding, **size).save_pretrained(folder)
        text = {"hf_model_name": str(folder), "hf_model_pretrained": False, "hf_pooler_type": "mean_pooler"}
        encoder = build(config={**CONFIG, "text_cfg": text})
        PowerClip(AlignmentConfig(mosaics=1.0)).attach(encoder)
        mixed = PowerClip(AlignmentConfig(mosaics=1.0, mosaic_texts="mixed"))
        if padding == 0:
            mixed.attach(encoder)
            continue
        with pytest.raises(UserError, match="pads with token 0"):
            mixed.attach(encoder)


def test_what_cannot_have_mosaics_says_so():
    dropping = build(config={**CONFIG, "vision_cfg": {**CONFIG["vision_cfg"], "patch_dropout": 0.5}})
    with pytest.raises(UserError, match="patch_dropout"):
        PowerClip(AlignmentConfig(mosaics=1.0)).attach(dropping)
    PowerClip().attach(dropping)
    PowerClip(AlignmentConfig(mosaics=1.0, mosaic_texts="mixed")).attach(tiny_encoder())
    for settings, match in (
        ({"mosaic_sets": 1.0}, "mosaic_sets is about mosaics"),
        ({"mosaic_texts": "alone"}, "mosaic_texts is about mosaics"),
        ({"mosaics": 0.5, "parse_trees": False}, "for phrases"),
    ):
        with pytest.raises(ValueError, match=match):
            AlignmentConfig(**settings)
