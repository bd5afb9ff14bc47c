"""Chosen pairs in Triton, approximate and exact, against the plain formulas: values and gradients."""

import itertools

import pytest
import torch
from kernel_examples import DEVICE, INSTANCES, assert_scores, instance

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.kernels import exact_pairs
from powerclip.alignment.kernels import pairs as module
from powerclip.alignment.score import score_pairs

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("small_tiles")]
NAMES = ["one node each", "one region", "one image", "all equal", "all negative", "zero"]
CONFIGS = {
    "default": {},
    "any set": {"largest_set": 0},
    "with the empty set": {"largest_set": 0, "empty_set": True, "similarity": "sum"},
    "R2T alone": {"t2r": False},
    "T2R alone": {"r2t": False},
}


def chosen(one, count: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs at random, some of them twice, some images and captions never."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(len(one.regions), (count,), generator=generator)
    return image.to(DEVICE), torch.randint(len(one.segments), (count,), generator=generator).to(DEVICE)


def gradients(score, one, dtype: torch.dtype) -> list[torch.Tensor]:
    regions, nodes = one.regions.to(dtype).requires_grad_(), one.nodes.to(dtype).requires_grad_()
    scores = score(regions, nodes)
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [scores.detach(), *torch.autograd.grad((scores * weights.to(scores)).sum(), [regions, nodes])]


def with_absent(image: torch.Tensor) -> torch.Tensor:
    """The same with every third pair taken out, the first one too."""
    return torch.where(torch.arange(len(image), device=DEVICE) % 3 == 0, -1, image)


def assert_plain_scores(one, image: torch.Tensor, caption: torch.Tensor, tolerances=(1e-5,) * 3, **settings) -> None:
    """Scores and gradients are those of nodes and regions that are gathered for each pair."""

    def score(backend):
        config = AlignmentConfig(**{**settings, "backend": backend})
        return lambda regions, nodes: score_pairs(regions, nodes, one.segments, image, caption, config)

    expected = gradients(score("reference"), one, torch.float64)
    found = gradients(score("triton"), one, torch.float32)
    for ours, exact, tolerance in zip(found, expected, tolerances, strict=True):
        assert_scores(ours, exact, tolerance)


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("name", ["ragged, odd", *NAMES])
def test_pairs_that_are_not_there_change_nothing(name, absent):
    one = INSTANCES[name]()
    image, caption = chosen(one)
    assert_plain_scores(one, with_absent(image) if absent else image, caption, tau=0.3, largest_set=0)


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("piece", [1, 2, 5, 64])
def test_the_pairs_of_a_hub_are_shared_out(monkeypatch, piece, absent):
    monkeypatch.setattr(module, "PIECE", piece)
    one = INSTANCES["ragged, few"]()
    image, caption = chosen(one, 30)
    image[:17], caption[9:25] = 2, 1
    assert_plain_scores(one, with_absent(image) if absent else image, caption, tau=0.3, largest_set=0)


@pytest.mark.parametrize("owners", [1, 2, 10**9])
def test_a_program_may_do_several_tiles_of_the_width(monkeypatch, owners):
    monkeypatch.setattr(module, "OWNERS", owners)
    monkeypatch.setattr(module, "TILE_WIDTH", 16)
    one = INSTANCES["ragged, few"]()
    assert_plain_scores(one, *chosen(one), tau=0.3, largest_set=0)


@pytest.mark.parametrize(("count", "further"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_every_pair_is_in_one_piece(monkeypatch, count, further):
    monkeypatch.setattr(module, "PIECE", 4)
    owner = torch.tensor([1, *[2] * count, -1, 0, -1, *[-1] * 10])
    order, starts, first, owners = module._pieces(owner, 3)
    assert [owner[order[a:b]].tolist() for a, b in itertools.pairwise(starts.tolist())] == [[0], [1], [2] * count]
    assert first.tolist() == [0, 0, 0, further]
    assert owners.tolist() == [2] * further + [3] * (len(owner) // 4 - further)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("aggregation", ["nla", "exact"])
@pytest.mark.parametrize("config", CONFIGS)
def test_absent_pairs_score_nothing_and_send_no_gradient(config, aggregation, backend):
    one = INSTANCES["ragged, few"]()
    image, caption = chosen(one)
    image = with_absent(image)
    settings = AlignmentConfig(aggregation=aggregation, backend=backend, tau=0.05, **CONFIGS[config])
    there = image >= 0

    def listed(regions, nodes):
        return score_pairs(regions, nodes, one.segments, image, caption, settings)

    def left_out(regions, nodes):
        scores = score_pairs(regions, nodes, one.segments, image[there], caption[there], settings)
        return torch.zeros(len(image), dtype=scores.dtype, device=DEVICE).index_put((there,), scores)

    for ours, expected in zip(
        gradients(listed, one, torch.float32), gradients(left_out, one, torch.float32), strict=True
    ):
        assert_scores(ours, expected.double(), 1e-6)


@pytest.mark.parametrize("aggregation", ["nla", "exact"])
def test_a_list_without_pairs_is_all_zero(aggregation):
    one, settings = INSTANCES["one region"](), AlignmentConfig(aggregation=aggregation, backend="triton")
    image, caption = torch.full((3,), -1, device=DEVICE), torch.tensor([0, 1, 1], device=DEVICE)
    found = gradients(lambda r, n: score_pairs(r, n, one.segments, image, caption, settings), one, torch.float32)
    assert all((values == 0).all() for values in found)


@pytest.mark.parametrize("aggregation", ["nla", "exact"])
def test_no_pairs_have_no_gradient(aggregation):
    one, config = INSTANCES["one region"](), AlignmentConfig(aggregation=aggregation, backend="triton")
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    scores, *found = gradients(lambda r, n: score_pairs(r, n, one.segments, none, none, config), one, torch.float32)
    assert scores.shape == (0,)
    assert all((gradient == 0).all() for gradient in found)


@pytest.mark.parametrize("aggregation", ["nla", "exact"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_and_gradients_equal_the_formulas(name, config, aggregation):
    one = INSTANCES[name]()
    assert_plain_scores(one, *chosen(one), aggregation=aggregation, tau=0.05, **CONFIGS[config])


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("name", ["ragged, few", "all negative", "barely negative", "huge"])
def test_approximate_scores_at_the_papers_temperature(name, preset):
    one = INSTANCES[name]()
    # Float32 rounds Σ q/τ, thousands here, and a softmax over nodes turns on the absolute error of that.
    assert_plain_scores(one, *chosen(one), (1e-5, 5e-3, 5e-3), **vars(AlignmentConfig.named(preset)))


@pytest.mark.parametrize("empty_set", [False, True])
@pytest.mark.parametrize(("regions", "tile", "tiles"), [(5, 16, 2), (6, 16, 4), (9, 128, 4)])
def test_more_sets_than_one_tile_holds(monkeypatch, regions, tile, tiles, empty_set):
    used = []

    def run_pair_kernel(*arguments):
        used.append(2**regions // arguments[-1]["TILE_S"])
        return module.run_pair_kernel(*arguments)

    monkeypatch.setattr(exact_pairs, "TILE_SETS", tile)
    monkeypatch.setattr(exact_pairs, "run_pair_kernel", run_pair_kernel)
    one = instance([3, 6, 1], 4, regions)
    assert_plain_scores(one, *chosen(one, 5), aggregation="exact", t2r=False, similarity="sum", empty_set=empty_set)
    assert used == [tiles]


@pytest.mark.parametrize("piece", [3, 64])
def test_two_runs_give_the_same_bits(monkeypatch, piece):
    monkeypatch.setattr(module, "PIECE", piece)
    one = instance([1, 7, 3, 12], 9, 6, width=70)
    image, caption = chosen(one, 40)
    image[10:25] = -1
    image[25:] = 7
    config = AlignmentConfig(backend="triton")
    runs = [
        gradients(lambda r, n: score_pairs(r, n, one.segments, image, caption, config), one, torch.float32)
        for _ in range(2)
    ]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
