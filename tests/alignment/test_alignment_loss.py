"""The loss: what is contrasted with what; neither selecting pairs first nor spreading them over ranks changes it.

On ranks with real towers it is tested in tests/train. Here kernels meet several ranks: Triton decides at its import
whether it interprets, so each rank is a process.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from alignment_examples import random_parts, random_segments, random_similarities, random_trees

from powerclip.alignment import AlignmentConfig, Parts, alignment_loss, embed_parts, random_boxes
from powerclip.alignment.contrast import off_diagonal
from powerclip.alignment.loss import gather_nodes
from powerclip.alignment.powerset import exact_r2t, exact_t2r, set_similarities
from powerclip.alignment.ragged import Segments, segment_mean
from powerclip.alignment.regions import subset_matrix
from powerclip.alignment.score import aggregate, score_all, score_pairs
from powerclip.runtime.distributed import SINGLE

CONFIGS = {
    "paper": AlignmentConfig.named("paper"),
    "default": AlignmentConfig(),
    "default, hardest": AlignmentConfig(negatives="hardest"),
    "any set": AlignmentConfig(largest_set=0, negatives="hardest"),
    "default, k": AlignmentConfig(negatives="k", k=3),
    "softmax over sums": AlignmentConfig(similarity="sum", negatives="k", k=2),
    "cosine": AlignmentConfig(similarity="cosine", aggregation="exact", largest_set=0, negatives="k", k=2),
    "triplet, all": AlignmentConfig(loss="triplet", negatives="all"),
    "triplet, k, empty set": AlignmentConfig(loss="triplet", negatives="k", k=4, empty_set=True),
    "exact": AlignmentConfig(aggregation="exact", negatives="hardest"),
    "exact, paper": AlignmentConfig.named("paper", aggregation="exact"),
    "single regions": AlignmentConfig(region_sets=False, negatives="k", k=2),
    "single regions, exact": AlignmentConfig(region_sets=False, aggregation="exact", negatives="hardest"),
    "sets of at most 2": AlignmentConfig(largest_set=2, negatives="k", k=2),
    "sets of at most 2, empty": AlignmentConfig.named("paper", largest_set=2),
    "semi-hard": AlignmentConfig(negatives="semi_hard"),
    "semi-hard triplet": AlignmentConfig.named("paper", negatives="semi_hard"),
    "no R2T": AlignmentConfig(r2t=False, negatives="hardest"),
    "no T2R": AlignmentConfig(t2r=False, negatives="hardest"),
}


def with_gradient(config: AlignmentConfig, gradient: str) -> AlignmentConfig:
    return AlignmentConfig(**{**vars(config), "gradient": gradient})


def literal_loss(scores: torch.Tensor, config: AlignmentConfig) -> torch.Tensor:
    """The loss of a matrix of scores [C, C], row by row and column by column."""
    count = len(scores)
    k = {"hardest": 1, "semi_hard": 1, "k": config.k, "all": count - 1}[config.negatives]
    directions = []
    for matrix in (scores, scores.T):
        losses = []
        for i, row in enumerate(matrix):
            negatives = torch.cat([row[:i], row[i + 1 :]])
            if config.negatives == "semi_hard" and (negatives < row[i]).any():
                negatives = negatives[negatives < row[i]]
            hard = negatives.topk(min(k, len(negatives))).values
            if config.loss == "triplet":
                losses.append(F.relu(hard - row[i] + config.gamma).mean())
            else:
                losses.append((config.scale * torch.cat([row[i : i + 1], hard])).logsumexp(0) - config.scale * row[i])
        directions.append(torch.stack(losses).mean())
    return torch.stack(directions).sum() / (1 if config.loss == "triplet" else 2)


@pytest.mark.parametrize("gradient", ["select", "autograd"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_that_of_the_matrix_of_scores(name, gradient):
    config, parts = with_gradient(CONFIGS[name], gradient), random_parts(8, 5, 16, seed=0)
    inputs = [parts.regions, parts.nodes]
    scores = score_all(*inputs, parts.segments, AlignmentConfig(**{**vars(config), "backend": "reference"}))
    expected, result = literal_loss(scores, config), alignment_loss(parts, config)
    torch.testing.assert_close(result.loss, expected)
    for one, other in zip(
        torch.autograd.grad(result.loss, inputs),
        torch.autograd.grad(expected, inputs, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    hardest = off_diagonal(scores).amax(1)
    torch.testing.assert_close(result.positive, scores.diagonal().mean())
    torch.testing.assert_close(result.negative, hardest.mean())
    assert result.violation == (hardest >= scores.diagonal()).float().mean()


@pytest.mark.parametrize("name", CONFIGS)
def test_select_then_differentiate_equals_plain_autograd(name):
    results = []
    for gradient in ("select", "autograd"):
        parts = random_parts(8, 5, 16, seed=0, dtype=torch.float32)
        result = alignment_loss(parts, with_gradient(CONFIGS[name], gradient))
        results.append((result, torch.autograd.grad(result.loss, [parts.regions, parts.nodes])))
    (ours, our_gradients), (plain, plain_gradients) = results
    torch.testing.assert_close(ours.loss, plain.loss, rtol=1e-6, atol=1e-6)
    for one, other in zip(our_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.violation, plain.violation)


def test_the_paper_preset_is_the_printed_loss():
    """Eqs. 6 to 9, literally, on exact similarities."""
    parts = random_parts(5, 4, 8, seed=1)
    q = torch.einsum("bmd,td->tbm", parts.regions, parts.nodes)
    scores = (exact_r2t(q, parts.segments) + exact_t2r(q, parts.segments)).T
    expected = 0.0
    for matrix in (scores, scores.T):
        for i in range(5):
            negative = max(matrix[i, j].item() for j in range(5) if j != i)
            expected += max(negative - matrix[i, i].item() + 0.2, 0) / 5
    config = AlignmentConfig.named("paper", aggregation="exact")
    assert alignment_loss(parts, config).loss.item() == pytest.approx(expected)
    assert config.weight == 0.1


def test_softmax_over_all_negatives_is_cross_entropy():
    parts = random_parts(6, 4, 8, seed=2)
    config = AlignmentConfig(negatives="all", loss="softmax")
    logits = 7.0 * score_all(parts.regions, parts.nodes, parts.segments, config)
    labels = torch.arange(6)
    expected = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    torch.testing.assert_close(alignment_loss(parts, config, scale=7.0).loss, expected)


def test_k_negatives_of_the_whole_batch_are_all_negatives():
    parts = random_parts(6, 4, 8, seed=3)
    for loss in ("softmax", "triplet"):
        every = alignment_loss(parts, AlignmentConfig(loss=loss, negatives="all")).loss
        k = alignment_loss(parts, AlignmentConfig(loss=loss, negatives="k", k=99)).loss
        torch.testing.assert_close(every, k)


@pytest.mark.parametrize("gradient", ["select", "autograd"])
@pytest.mark.parametrize("loss", ["softmax", "triplet"])
def test_a_semi_hard_negative_is_the_hardest_below_the_positive_or_else_the_hardest(loss, gradient):
    parts = random_parts(6, 4, 8, seed=7)
    config = AlignmentConfig(loss=loss, negatives="semi_hard", gradient=gradient)
    scores = score_all(parts.regions, parts.nodes, parts.segments, config)
    expected, alternatives = torch.zeros((), dtype=scores.dtype), set()
    for matrix in (scores, scores.T):
        for i in range(6):
            others = [matrix[i, j] for j in range(6) if j != i]
            below = [score for score in others if score < matrix[i, i]]
            alternatives.add(bool(below))
            gap = max(below or others) - matrix[i, i]
            expected = expected + (F.softplus(7 * gap) / 12 if loss == "softmax" else F.relu(gap + config.gamma) / 6)
    assert alternatives == {True, False}  # both halves of the rule are at work
    found = alignment_loss(parts, config, scale=7.0)
    torch.testing.assert_close(found.loss, expected)
    for one, other in zip(
        torch.autograd.grad(found.loss, [parts.regions, parts.nodes]),
        torch.autograd.grad(expected, [parts.regions, parts.nodes]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_semi_hard_negatives_do_not_hide_violations():
    parts = random_parts(8, 5, 16, seed=0)
    hard, semi = (alignment_loss(parts, AlignmentConfig(negatives=n)) for n in ("hardest", "semi_hard"))
    assert torch.equal(hard.violation, semi.violation)
    torch.testing.assert_close(hard.negative, semi.negative)


@pytest.mark.parametrize("k", [1, 2, 5, 70])
@pytest.mark.parametrize("loss", ["softmax", "triplet"])
def test_an_annealed_step_is_that_of_its_k(loss, k):
    # 70 pairs: the lowest k are selected, the others differentiated with all.
    results = []
    for settings, given in (({"anneal": True}, k), ({"k": k}, None)):
        parts = random_parts(70, 3, 8, seed=9)
        value = alignment_loss(parts, AlignmentConfig(loss=loss, negatives="k", **settings), k=given).loss
        results.append([value, *torch.autograd.grad(value, [parts.regions, parts.nodes])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["paper", "default", "exact", "single regions"])
def test_the_order_of_the_regions_does_not_matter(name):
    parts = random_parts(6, 5, 8, seed=4)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    shuffled = Parts(parts.regions[:, order], parts.nodes, parts.segments)
    torch.testing.assert_close(alignment_loss(shuffled, CONFIGS[name]).loss, alignment_loss(parts, CONFIGS[name]).loss)


@pytest.mark.parametrize("name", ["paper", "default", "exact", "single regions"])
def test_the_order_of_the_batch_does_not_matter(name):
    parts = random_parts(6, 5, 8, seed=5)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    members = parts.nodes.split(parts.segments.lengths.tolist())
    shuffled = Parts(
        parts.regions[order],
        torch.cat([members[i] for i in order]),
        Segments.from_lengths(parts.segments.lengths[order]),
    )
    torch.testing.assert_close(alignment_loss(shuffled, CONFIGS[name]).loss, alignment_loss(parts, CONFIGS[name]).loss)


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_of_chosen_pairs_equal_the_matrix(name):
    parts = random_parts(5, 4, 8, seed=6)
    scores = score_all(parts.regions, parts.nodes, parts.segments, CONFIGS[name])
    image, caption = torch.tensor([0, 4, 2, 2]), torch.tensor([1, 4, 0, 3])
    chosen = score_pairs(parts.regions, parts.nodes, parts.segments, image, caption, CONFIGS[name])
    torch.testing.assert_close(chosen, scores[image, caption])


def test_blocks_of_images_give_the_same_scores(monkeypatch):
    parts = random_parts(7, 4, 8, seed=7)
    whole = score_all(parts.regions, parts.nodes, parts.segments, CONFIGS["paper"])
    monkeypatch.setattr("powerclip.alignment.score.BLOCK_ELEMENTS", 2 * len(parts.nodes) * 4)
    torch.testing.assert_close(score_all(parts.regions, parts.nodes, parts.segments, CONFIGS["paper"]), whole)


def test_mean_similarity_divides_nodes_by_leaves_and_scores_by_regions():
    phrases = random_trees(4, 0)
    generator = torch.Generator().manual_seed(0)
    patches, words = torch.randn(4, 9, 8, generator=generator), torch.randn(4, 12, 8, generator=generator)
    masks = random_boxes(4, 5, (3, 3), generator)
    sums, means = (embed_parts(patches, masks, words, phrases, AlignmentConfig(similarity=s)) for s in ("sum", "mean"))
    sizes = phrases.node_end - phrases.node_start
    torch.testing.assert_close(means.nodes * sizes.unsqueeze(-1), sums.nodes)
    q = torch.randn(len(sums.nodes), 3, 5)
    torch.testing.assert_close(
        aggregate(q, sums.segments, AlignmentConfig(similarity="mean", largest_set=0)) * 5,
        aggregate(q, sums.segments, AlignmentConfig(similarity="sum", largest_set=0)),
    )


@pytest.mark.parametrize("empty_set", [True, False])
@pytest.mark.parametrize("largest", [1, 2, 3, 9])
def test_a_bound_on_the_best_set_equals_enumerating_the_sets_within_it(largest, empty_set):
    segments = random_segments(4, 0)
    q = random_similarities(segments, images=3, regions=5, seed=0)
    q[0] = -q[0].abs()  # a node for which the best set is empty, where it may be
    size = subset_matrix(5, empty=empty_set).sum(-1)
    allowed = set_similarities(q, empty_set=empty_set)[..., size <= largest]
    config = AlignmentConfig(similarity="sum", largest_set=largest, empty_set=empty_set, r2t=False)
    torch.testing.assert_close(aggregate(q, segments, config), segment_mean(allowed.amax(-1), segments))


def test_centring_removes_what_all_patches_and_all_words_share():
    phrases = random_trees(4, 1)
    generator = torch.Generator().manual_seed(1)
    patches, words = torch.randn(4, 9, 8, generator=generator), torch.randn(4, 12, 8, generator=generator)
    masks = random_boxes(4, 5, (3, 3), generator)
    plain = embed_parts(patches, masks, words, phrases, AlignmentConfig(centre="batch"))
    shifted = embed_parts(patches + 3.0, masks, words - 2.0, phrases, AlignmentConfig(centre="batch"))
    torch.testing.assert_close(shifted.regions, plain.regions, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shifted.nodes, plain.nodes, rtol=1e-4, atol=1e-5)


def test_statistics_tell_a_dead_batch_from_a_solved_one():
    width = 4
    nodes = torch.eye(width)
    segments = Segments.from_lengths(torch.ones(width, dtype=torch.long))
    solved = alignment_loss(Parts(torch.eye(width).unsqueeze(1), nodes, segments), CONFIGS["paper"])
    dead = alignment_loss(Parts(-torch.ones(width, 1, width) / 2, nodes, segments), CONFIGS["paper"])
    assert (solved.violation, solved.empty) == (0, 0)
    assert (dead.violation, dead.empty) == (1, 1)


def test_off_diagonal_skips_the_positive():
    scores = torch.tensor([[9.0, 1.0, 2.0], [3.0, 9.0, 4.0], [6.0, 5.0, 9.0]])
    assert off_diagonal(scores).tolist() == [[1.0, 2.0], [3.0, 4.0], [6.0, 5.0]]


def test_one_rank_has_its_own_nodes_and_copies_nothing():
    parts = random_parts(5, 3, 8, seed=1)
    nodes, segments = gather_nodes(parts, SINGLE)
    assert nodes is parts.nodes
    assert segments is parts.segments


@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_needs_no_device_sync(name, monkeypatch):
    syncs: list[str] = []

    def record(method: str):
        original = getattr(torch.Tensor, method)

        def call(*arguments, **options):
            syncs.append(method)
            return original(*arguments, **options)

        return call

    for method in ("nonzero", "item", "tolist", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, method, record(method))
    # `exact_all_cpu` runs on a CPU alone, where there is nothing to wait for.
    config = replace(CONFIGS[name], backend="reference") if CONFIGS[name].aggregation == "exact" else CONFIGS[name]
    alignment_loss(random_parts_without_sync(), config).loss.backward()
    assert syncs == []


def random_parts_without_sync() -> Parts:
    segments = Segments.from_lengths(torch.tensor([2, 1, 3, 1, 2]), total=9, longest=3)
    return Parts(torch.randn(5, 4, 8).requires_grad_(), torch.randn(9, 8).requires_grad_(), segments)


def test_blocks_of_images_give_the_same_loss(monkeypatch):
    config = AlignmentConfig(negatives="k", k=3)
    whole = alignment_loss(random_parts(11, 4, 8, seed=3), config).loss
    monkeypatch.setattr("powerclip.alignment.negatives.BLOCK_ELEMENTS", 4 * 11)
    torch.testing.assert_close(alignment_loss(random_parts(11, 4, 8, seed=3), config).loss, whole)


def test_one_pair_alone_has_nothing_to_be_contrasted_with():
    with pytest.raises(ValueError, match="at least 2 pairs"):
        alignment_loss(random_parts(1, 3, 8, seed=0), AlignmentConfig())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"similarity": "average"}, r"'alignment.similarity' must be sum \| mean \| cosine, got 'average'"),
        ({"alpha": 1.5}, "alignment.alpha must lie in"),
        ({"tau": 0.0}, "alignment.tau must be positive"),
        ({"r2t": False, "t2r": False}, "nothing is left to align"),
        ({"t1": "gelu"}, "needs largest_set: 0"),
        ({"t1": "gelu", "largest_set": 0, "empty_set": False}, "needs empty_set: true"),
        ({"t2": "sigmoid", "empty_set": False}, "needs empty_set: true"),
        ({"k": 0}, "alignment.k must be at least 1"),
        ({"ramp": 1.5}, r"alignment.ramp must lie in \[0, 1\]"),
        ({"trains": "neither"}, "alignment.trains"),
        ({"projection": "own"}, "alignment.projection"),
        ({"negatives": "hard"}, "semi_hard"),
        ({"similarity": "cosine"}, "cosine has no approximation: it needs aggregation: exact"),
        ({"anneal": True}, "alignment.anneal needs negatives: k"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        AlignmentConfig(**settings)


# Two ranks of three pairs each against one process with all six. `listed`: pairs are chosen, also where the gradient of
# all would cost less; hubs are shared out; and a device sync for the number of a rank's pairs is an error.
ON_RANKS = """
import sys
import torch
from torch import distributed as dist
from alignment_examples import random_parts
from powerclip.alignment import AlignmentConfig, Parts, alignment_loss, loss as module, score
from powerclip.alignment.kernels import pairs
from powerclip.alignment.ragged import Segments
from powerclip.runtime.distributed import Ranks

def refuse(*_, **__):
    raise AssertionError("a device sync")

rank, meeting, pairs_are = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
if pairs_are != "all":
    score.PAIRS_AT_LEAST = score.SIMILARITIES_PER_PAIR = 0
    pairs.PIECE = 2
if pairs_are == "listed":
    torch.Tensor.nonzero = refuse
if pairs_are == "listed without absent ones":
    module.MOST_LISTED = 0
pairs.SMALLEST = 4  # what lies beyond an instance, the interpreter computes too
for aggregation in ("nla", "exact"):
    for settings in ({"negatives": "hardest"}, {"negatives": "semi_hard"}, {"negatives": "k", "k": 3}):
        settings = {**settings, "aggregation": aggregation, "tau": 0.05}
        whole = random_parts(6, 3, 16, seed=1, dtype=torch.float32)
        loss = alignment_loss(whole, AlignmentConfig(**settings, backend="reference")).loss
        expected = [loss.detach(), *torch.autograd.grad(loss, [whole.regions, whole.nodes])]
        rows = slice(3 * rank, 3 * rank + 3)
        lengths = whole.segments.lengths
        nodes = slice(int(lengths[: rows.start].sum()), int(lengths[: rows.stop].sum()))
        regions, own = (v.detach().clone().requires_grad_() for v in (whole.regions[rows], whole.nodes[nodes]))
        ours = Parts(regions, own, Segments.from_lengths(lengths[rows]))
        loss = alignment_loss(ours, AlignmentConfig(**settings, backend="triton"), ranks=Ranks(rank, 2)).loss
        of_regions, of_nodes = torch.autograd.grad(loss, [regions, own])
        dist.all_reduce(loss := loss.detach())
        results = [loss / 2, of_regions / 2, of_nodes / 2]
        for one, other in zip(results, [expected[0], expected[1][rows], expected[2][nodes]], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text: f"{settings}: {text}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("pairs_are", ["listed", "listed without absent ones", "all"])
def test_kernels_on_two_ranks_give_the_loss_and_the_gradients_of_one_process(tmp_path, pairs_are):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ON_RANKS, str(rank), str(tmp_path / "meeting"), pairs_are],
            cwd=Path(__file__).parent,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    complaints = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], complaints
