"""Scores by parts: against brute force over patches, tokens, sets of boxes and nodes; what batches and ranks change."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
from benchmark_examples import CLASSES, caption_table, class_folders, sugarcrepe, tiny_model, winoground
from spawned_ranks import spawn_ranks
from torch.nn.functional import normalize

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.late_interaction import late_interaction
from powerclip.data.tokens import pack_phrases
from powerclip.encoders import preprocess_for
from powerclip.errors import UserError
from powerclip.evaluate import embedder as embedding
from powerclip.evaluate import pair_scores
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.pair_scores import ScoreSettings, compare_parts, draw_regions, parse_texts
from powerclip.evaluate.part_tasks import among_best, reranked, score_by_parts
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.tasks import CaptionRetrieval
from powerclip.runtime.distributed import join_ranks

PAPER = AlignmentConfig.named("paper", aggregation="exact")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> CaptionRetrieval:
    task = read_path(caption_table(tmp_path_factory.mktemp("table"), 6))
    assert isinstance(task, CaptionRetrieval)
    return task


@torch.inference_mode()
def features(model, task) -> tuple[list[torch.Tensor], list[torch.Tensor], list]:
    """Patches [N, D] of each image and words [L, D] of each caption, one by one, in float64."""
    encoder, tokenizer = model
    prepare = preprocess_for(encoder)
    images = [
        encoder.encode_patches(prepare(task.images.decode(task.images.read(number)))[None])[1][0].double()
        for number in range(len(task.images.names))
    ]
    tokenized = [tokenizer.encode(caption) for caption in task.captions]
    words = [encoder.encode_words(tokenizer.pad([tokens.ids]))[1][0].double() for tokens in tokenized]
    return images, words, tokenized


def test_late_scores_are_means_of_maxima(model, data):
    images, words, _ = features(model, data)
    found = compare_parts(Embedder(*model), data.images, data.captions, ScoreSettings("late"))
    inner = compare_parts(Embedder(*model), data.images, data.captions, ScoreSettings("late", ends=False))
    for i, patches in enumerate(images):
        for j, tokens in enumerate(words):
            cosines = normalize(patches, dim=-1) @ normalize(tokens, dim=-1).T
            assert found.to_text[i, j].item() == pytest.approx(cosines.amax(1).mean().item(), abs=1e-5)
            assert found.to_image[i, j].item() == pytest.approx(cosines.amax(0).mean().item(), abs=1e-5)
            assert inner.to_image[i, j].item() == pytest.approx(cosines[:, 1:-1].amax(0).mean().item(), abs=1e-5)


def test_late_scores_are_those_that_filip_trains_on(model, data):
    encoder, tokenizer = model
    images, _, tokenized = features(model, data)
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    with torch.inference_mode():
        words = normalize(encoder.encode_words(tokens)[1], dim=-1)
    real = torch.arange(tokens.shape[1]) < torch.tensor([len(caption) for caption in tokenized])[:, None]
    patches = normalize(torch.stack(images).float(), dim=-1)
    to_text, to_image = late_interaction(patches, words, real)
    found = compare_parts(Embedder(*model), data.images, data.captions, ScoreSettings("late"))
    torch.testing.assert_close(found.to_text, to_text)
    torch.testing.assert_close(found.to_image, to_image)


def powerset_by_hand(model, task, settings: ScoreSettings) -> torch.Tensor:
    """Q̄ [n, captions] set by set, node by node (Eqs. 1 to 7), less the means of the data set where it centres."""
    images, words, tokenized = features(model, task)
    config, grid = settings.alignment, model[0].grid
    trees = parse_texts(Embedder(*model), task.captions)
    packed = [pack_phrases([tree], [tokens], len(w)) for tree, tokens, w in zip(trees, tokenized, words, strict=True)]
    centred = config.centre == "batch"
    mean_word = torch.cat([w[p.words[0]] for w, p in zip(words, packed, strict=True)]).mean(0) * centred
    mean_patch = torch.stack([patches.mean(0) for patches in images]).mean(0) * centred
    mean = config.similarity == "mean"
    total = torch.zeros(len(images), len(words), dtype=torch.double)
    for i, patches in enumerate(images):
        masks = draw_regions([i], grid, settings)[0]
        phi = [normalize((patches[mask] - mean_patch).sum(0), dim=0) for mask in masks]
        sets = list(chain.from_iterable(combinations(phi, size) for size in range(len(phi) + 1)))
        sets = sets if config.empty_set else sets[1:]
        summed = torch.stack([sum(chosen, torch.zeros_like(patches[0])) for chosen in sets])
        for j, (tokens, phrases) in enumerate(zip(words, packed, strict=True)):
            psi = [
                normalize((tokens[start:end][phrases.words[0, start:end]] - mean_word).sum(0), dim=0)
                for start, end in zip(phrases.leaf_start.tolist(), phrases.leaf_end.tolist(), strict=True)
            ]
            nodes = [
                torch.stack(psi[start:end]).sum(0) / ((end - start) if mean else 1)
                for start, end in zip(phrases.node_start.tolist(), phrases.node_end.tolist(), strict=True)
            ]
            q = torch.stack(nodes) @ summed.T  # [K, sets]
            small = torch.tensor([not config.largest_set or len(chosen) <= config.largest_set for chosen in sets])
            r2t, t2r = q.amax(0).mean() / (len(phi) if mean else 1), q[:, small].amax(1).mean()
            largest = config.largest_set or len(phi)
            total[i, j] = r2t + (t2r / largest if mean else t2r)
    return total


@pytest.mark.parametrize(
    "settings",
    [
        ScoreSettings("powerset", alignment=PAPER, boxes=4),
        ScoreSettings("powerset", alignment=AlignmentConfig(aggregation="exact"), boxes=4, seed=3, largest=0.5),
        ScoreSettings("powerset", alignment=AlignmentConfig(aggregation="exact", largest_set=0), grid=2),
    ],
    ids=["printed", "default", "grid"],
)
def test_powerset_scores_are_those_of_all_sets(model, data, settings):
    found = compare_parts(Embedder(*model), data.images, data.captions, settings)
    expected = powerset_by_hand(model, data, settings)
    torch.testing.assert_close(found.to_text.double(), expected, atol=2e-5, rtol=1e-4)
    assert torch.equal(found.to_text, found.to_image)


@pytest.mark.parametrize("score", ["late", "powerset"])
def test_batches_and_order_change_no_score(model, data, score, monkeypatch):
    settings = ScoreSettings(score, boxes=3)
    whole = compare_parts(Embedder(*model), data.images, data.captions, settings)
    order = torch.randperm(len(data.captions), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(embedding, "BATCH", 2)
    monkeypatch.setattr(embedding, "CHUNK", 4)
    monkeypatch.setattr(pair_scores, "BATCH", 3)
    monkeypatch.setattr(pair_scores, "PAIR_ELEMENTS", 4_000)
    shuffled = [data.captions[number] for number in order]
    parts = compare_parts(Embedder(*model), data.images, shuffled, settings)
    torch.testing.assert_close(parts.to_text, whole.to_text[:, order])
    wanted = torch.rand(whole.to_text.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    some = compare_parts(Embedder(*model), data.images, data.captions, settings, wanted=wanted)
    torch.testing.assert_close(some.to_image, torch.where(wanted, whole.to_image, 0))


def scores_of_a_rank(folder: Path, table: Path) -> list[torch.Tensor]:
    task = read_path(table)
    monkey_chunk, embedding.CHUNK = embedding.CHUNK, 2
    with join_ranks("cpu") as ranks:
        embedder = Embedder(*tiny_model(), ranks=ranks)
        several = [ScoreSettings("late"), ScoreSettings("powerset", boxes=3)]
        scores = [compare_parts(embedder, task.images, task.captions, one).to_text for one in several]
        scored = score_by_parts(task, embedder, ScoreSettings("powerset", boxes=3, rerank=3))
    embedding.CHUNK = monkey_chunk
    return [*scores, torch.tensor(list(scored.flat().values()))]


def test_two_ranks_give_the_scores_of_one(tmp_path):
    table = caption_table(tmp_path / "table", 9)
    first, second = spawn_ranks(2, scores_of_a_rank, tmp_path / "ranks", table)
    alone = scores_of_a_rank(tmp_path, table)
    for one, other, expected in zip(first, second, alone, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected)


def test_a_target_has_the_mean_score_of_its_texts(model, data):
    texts, target = ["a bear", "the bear", "a cup"], torch.tensor([0, 0, 1])
    each = compare_parts(Embedder(*model), data.images, texts, ScoreSettings("late")).to_text
    found = compare_parts(Embedder(*model), data.images, texts, ScoreSettings("late"), target=target).to_text
    torch.testing.assert_close(found, torch.stack([each[:, :2].mean(1), each[:, 2]], 1))


def test_boxes_are_the_images_own_and_a_grids_are_all_of_them():
    settings = ScoreSettings("powerset", boxes=5, seed=1)
    several = draw_regions([4, 9, 2], (6, 6), settings)
    assert torch.equal(draw_regions([9], (6, 6), settings)[0], several[1])
    assert not torch.equal(several[0], several[1])
    assert several.any(-1).all()
    grid = draw_regions([0], (6, 6), ScoreSettings("powerset", grid=3))[0].view(-1, 6, 6)
    expected = set()
    for top, left in [(a, b) for a in range(3) for b in range(3)]:
        for bottom, right in [(a, b) for a in range(top, 3) for b in range(left, 3)]:
            cells = torch.zeros(6, 6, dtype=torch.bool)
            cells[2 * top : 2 * bottom + 2, 2 * left : 2 * right + 2] = True
            expected.add(tuple(cells.flatten().tolist()))
    assert {tuple(mask.flatten().tolist()) for mask in grid} == expected
    assert len(grid) == len(expected) == 36


def test_the_best_come_first_by_the_other_score_and_the_rest_follow():
    coarse = torch.tensor([[0.9, 0.8, 0.8, 0.1, -0.5]])
    fine = torch.tensor([[-30.0, 2.0, -7.0, 900.0, 900.0]])
    best = among_best(coarse, 2)
    assert best.tolist() == [[True, True, True, False, False]]  # level with the second
    assert reranked(coarse, fine, best).argsort(descending=True).tolist() == [[1, 2, 0, 3, 4]]
    hopeless = reranked(coarse, torch.full_like(fine, torch.nan), best)
    assert hopeless[0, :3].isnan().all()


def metrics_of(task, model, settings: ScoreSettings) -> dict:
    return score_by_parts(task, Embedder(*model), settings).parts


@pytest.mark.parametrize("score", ["late", "powerset"])
def test_reranking_everything_is_scoring_everything(model, data, tmp_path, score):
    tasks = [data, read_path(class_folders(tmp_path / "animals", 2)), read_path(winoground(tmp_path / "w", 3))]
    for task in tasks:
        settings = ScoreSettings(score, boxes=3)
        everything = metrics_of(task, model, settings)
        assert metrics_of(task, model, replace(settings, rerank=1000)) == everything
        of_global = task.score(Embedder(*model)).parts
        assert of_global[""].keys() == everything[""].keys()


def test_reranking_two_moves_nothing_beyond_the_second_place(model, data):
    found = metrics_of(data, model, ScoreSettings("late", rerank=2))[""]
    by_cosine = data.score(Embedder(*model)).parts[""]
    for name in found:
        if name.endswith(("@5", "@10")):
            assert found[name] == by_cosine[name]


def test_negatives_are_compared_pair_by_pair(model, tmp_path):
    task = read_path(sugarcrepe(tmp_path / "crepe"))
    scored = score_by_parts(task, Embedder(*model), ScoreSettings("late"))
    texts = [*task.captions, *task.negatives]
    matrix = compare_parts(Embedder(*model), task.images, texts, ScoreSettings("late")).to_text
    count = len(task.captions)
    right = matrix[task.image_of_item, torch.arange(count)] > matrix[task.image_of_item, count + torch.arange(count)]
    assert scored.parts[""]["acc"] == right.double().mean().item()
    assert "mean_image_acc" not in scored.parts[""]


def test_an_unreadable_image_is_left_out_of_means_and_ranks(model, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "TOLERANCE", 0.2)
    table = caption_table(tmp_path / "a", 9)
    (tmp_path / "a" / "photos" / "4.png").write_bytes(b"damaged")
    lines = table.read_text().splitlines()
    (tmp_path / "a" / "rest.csv").write_text("\n".join(line for line in lines if "/4.png" not in line) + "\n")
    for settings in (ScoreSettings("late"), ScoreSettings("late", rerank=3)):
        damaged = score_by_parts(read_path(table), Embedder(*model), settings)
        rest = score_by_parts(read_path(tmp_path / "a" / "rest.csv"), Embedder(*model), settings)
        assert damaged.parts == rest.parts
        assert len(damaged.corrupt) == 1
    powerset = score_by_parts(read_path(table), Embedder(*model), ScoreSettings("powerset", boxes=3))
    assert powerset.counts["images"] == 8


def test_what_cannot_be_scored_is_said_in_one_line(model, data, tmp_path):
    from powerclip.evaluate.tasks import LinearProbe

    animals = read_path(class_folders(tmp_path / "animals", 1, CLASSES))
    with pytest.raises(UserError, match="linear_probe does not compare"):
        score_by_parts(LinearProbe(animals, animals), Embedder(*model), ScoreSettings("late"))
    with pytest.raises(UserError, match="--rerank needs --score"):
        ScoreSettings("global", rerank=10)
    with pytest.raises(UserError, match=r"36 boxes have 2\^36 sets"):
        ScoreSettings("powerset", grid=3, alignment=AlignmentConfig(aggregation="exact"))
    with pytest.raises(UserError, match="there are global, late, powerset, not 'lat'"):
        ScoreSettings("lat")  # type: ignore[arg-type]
