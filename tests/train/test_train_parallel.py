"""Training on several ranks, real processes over gloo: loss, gradients, runs and checkpoints are those of one."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_workers import (
    CASES,
    TOWERS,
    alone,
    everything,
    look_at_cases,
    look_over,
)
from spawned_ranks import spawn_ranks
from tiny_run import same_weights, tiny, weights, write_tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import powerclip
from powerclip.cli import MAIN_RANK_SECONDS, app, fail
from powerclip.data.batch import BatchSpec
from powerclip.data.corpus import read_corpus
from powerclip.data.corpus_loader import CorpusLoader, pack_corpus
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder
from powerclip.errors import UserError
from powerclip.objectives import Plan
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.train import checkpoint
from powerclip.train.data import make_loader
from powerclip.train.loop import backward, train
from powerclip.train.metrics import read_metrics
from powerclip.train.state import start
from powerclip.train.towers import draw_uniform

# One with a scale of its own, one with a teacher and heads, one that decides over the whole batch.
SHARDED = ("powerclip", "a_clip", "clip_pgs")
# Every objective once, and both ways to reduce a column: a sum over ranks, and the hardest of all.
FOUR = (
    "clip",
    "flip",
    "a_clip",
    "e_clip",
    "clip_pgs",
    "filip",
    "sparc",
    "powerclip",
    "powerclip_as_printed",
    "powerclip_k",
    "powerclip_semi_hard",
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What one process finds for a case."""
    folder = tmp_path_factory.mktemp("one")
    return functools.cache(lambda case: alone(folder, case))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return spawn_ranks(2, everything, folder / "ranks", folder, tuple(CASES), SHARDED), folder


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return spawn_ranks(4, look_at_cases, tmp_path_factory.mktemp("four"), FOUR)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to rounding: a gradient's errors are measured by the largest of all gradients."""
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for name, value in expected.items() if name.startswith("gradient"))
    for name, value in expected.items():
        scale = largest if name.startswith("gradient") else 1.0
        torch.testing.assert_close(
            found[name] / scale, value / scale, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_loss_and_the_gradients_of_one(two_ranks, one, case):
    for answer in two_ranks[0]:
        assert_same(answer["cases"][case], one(case))


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_give_the_loss_and_the_gradients_of_one(four_ranks, one, case):
    for answer in four_ranks:
        assert_same(answer[case], one(case))


@pytest.mark.parametrize("case", CASES)
def test_a_batch_in_parts_gives_the_loss_and_the_gradients_of_the_whole(tmp_path, one, case):
    assert_same(alone(tmp_path, case, "train.accumulate=4"), one(case))


@pytest.mark.parametrize("case", CASES)
def test_parts_on_two_ranks_give_the_loss_and_the_gradients_of_the_whole(two_ranks, one, case):
    for answer in two_ranks[0]:
        assert_same(answer["in parts"][case], one(case))


@pytest.mark.parametrize("case", SHARDED)
def test_sharded_towers_give_the_loss_and_the_gradients_of_whole_ones(two_ranks, one, case):
    for way in ("sharded", "sharded, in parts"):
        assert_same(two_ranks[0][0][way][case], one(case))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_messages_of_one_rank_to_itself_change_nothing(tmp_path, device):
    cases = SHARDED if device == "cpu" else tuple(CASES)
    for number, overrides in enumerate([(), ("train.accumulate=2",), ("train.sharding=full",)]):
        (found,) = spawn_ranks(1, look_over, tmp_path / f"{number}", device, cases, *overrides)
        for case in cases:
            settings = (f"train.device={device}", "train.precision=float32", "train.compile=never")
            expected = alone(tmp_path, case, *settings)
            assert_same({k: v.cpu() for k, v in found[case].items()}, {k: v.cpu() for k, v in expected.items()})


@pytest.mark.parametrize("case", ["powerclip", "a_clip"])
def test_activations_that_are_computed_again_change_nothing(tmp_path, one, case):
    state = start(tiny(tmp_path, *TOWERS, *CASES[case], "train.checkpoint_activations=true"))
    assert state.encoder.clip.visual.transformer.grad_checkpointing
    assert_same(alone(tmp_path, case, "train.checkpoint_activations=true"), one(case))


@pytest.mark.parametrize("case", ["clip", "a_clip", "clip_pgs", "powerclip_mosaics"])
def test_plans_and_towers_compile_as_one_graph_each(tmp_path, case):
    recipe = tiny(tmp_path, *TOWERS, *CASES[case])
    state = start(recipe)
    batch = make_loader(recipe, state.encoder).batch(0)
    shape = state.objective.noise_shape(state.encoder)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    kind, plan = type(state.objective), Plan()
    compiled_plan, compiled_images, compiled_words = (
        torch.compile(function, backend=counter, fullgraph=True, dynamic=False)
        for function in (kind.plan, kind.encode_images, DualEncoder.encode_words)
    )
    if shape is not None:
        noise = torch.rand(len(batch), *shape)
        with torch.no_grad():
            plan = compiled_plan(state.objective, state.encoder, batch.images, noise, SINGLE)
    found = compiled_images(state.objective, state.encoder, batch.images, plan)
    text, _ = compiled_words(state.encoder, batch.tokens, dense=state.objective.dense)
    expected = state.towers(batch.images, batch.tokens, plan)
    torch.testing.assert_close(found.image, expected.image, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(text, expected.text, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == (2 if shape is None else 3)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("whole")
    result = train(tiny(folder, "evaluation.scenes=true"), folder / "run", quiet=True)
    return folder / "run", dict(result.results.scores)


def assert_near(one: Path, other: Path) -> None:
    """The same weights but for rounding, which Adam's first steps can blow up to the size of an update.

    Biases of attention's keys are left out: a softmax does not see them, so their gradient is rounding alone.
    """
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    for name in a:
        first, second = (_without_key_bias(name, values[name]) for values in (a, b))
        torch.testing.assert_close(first, second, rtol=0, atol=5e-4)


def _without_key_bias(name: str, value: torch.Tensor) -> torch.Tensor:
    if not name.endswith("in_proj_bias"):
        return value
    queries, _, values = value.chunk(3)
    return torch.cat([queries, values])


def test_a_run_on_two_ranks_logs_and_scores_what_a_run_on_one_does(two_ranks, whole_run):
    (first, second), folder = two_ranks
    run, scores = whole_run
    rows, expected = (list(read_metrics(path / "metrics.jsonl")) for path in (folder / "whole", run))
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        for name in ("loss", "clip", "alignment", "violation", "empty", "grad_norm", "batch/nodes", "batch/tokens"):
            if name in wanted:
                assert row[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-4), name
    assert_near(folder / "whole", run)
    assert first["scores"] == pytest.approx(scores, abs=0.02)
    assert first["scores"] == second["scores"]


def test_a_run_on_two_ranks_that_is_stopped_ends_bit_equal_to_one_that_is_not(two_ranks):
    folder = two_ranks[1]
    assert same_weights(folder / "two goes", folder / "whole")


@pytest.mark.parametrize("name", ["stopped", "sharded"])
def test_a_run_on_two_ranks_continues_on_one(tmp_path, two_ranks, whole_run, name):
    # Sharded or not, the checkpoint holds whole weights and moments.
    shutil.copytree(two_ranks[1] / name, tmp_path / name)
    saved = checkpoint.read(checkpoint.checkpoints(tmp_path / name / "checkpoints")[-1])
    assert saved["step"] == 5
    assert len(saved["random"]) == 2
    train(tiny(tmp_path), tmp_path / name, quiet=True, resume=True)
    assert_near(tmp_path / name, whole_run[0])


def test_a_sharded_run_is_saved_and_scored_whole(tmp_path, two_ranks):
    (first, second), folder = two_ranks
    result = train(tiny(tmp_path, "train.steps=3", "evaluation.scenes=true"), tmp_path / "run", quiet=True)
    assert_near(folder / "short", tmp_path / "run")
    assert first["sharded scores"] == second["sharded scores"] == pytest.approx(result.results.scores, abs=0.02)


def test_a_batch_that_cannot_be_shared_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"batch_size is 4, which 3 ranks × train.accumulate 2 .* multiple of 6"):
        start(tiny(tmp_path, "train.accumulate=2"), Ranks(0, 3))
    with pytest.raises(UserError, match=r"train\.accumulate must be at least 1"):
        tiny(tmp_path, "train.accumulate=0")


@pytest.mark.parametrize("case", ["clip", "powerclip"])
def test_parts_with_short_captions_only_are_not_padded_to_the_longest(tmp_path, mini_corpus, case):
    corpus = read_corpus(sorted(mini_corpus.glob("train-*.tar")), 32, None)
    spec = BatchSpec(image_size=(32, 32), grid=(4, 4), batch_size=8, regions=3, sort_by_length=True)
    loader = CorpusLoader(pack_corpus(corpus, CaptionTokenizer(context_length=40)), spec)
    batch = next(batch for batch in map(loader.batch, range(20)) if batch.short < batch.tokens.shape[1])
    recipe = tiny(tmp_path, *TOWERS, *CASES[case], "train.accumulate=4")
    whole = replace(recipe, train=replace(recipe.train, accumulate=1))
    found, seen = [], []
    for some, given in ((whole, replace(batch, short=0)), (recipe, batch)):
        state = start(some)
        tower = state.encoder.clip.transformer
        tower.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
        terms = backward(state, given, some)
        found.append([terms.total, *(p.grad for _, p in state.encoder.named_parameters())])
    longest = batch.tokens.shape[1]
    assert seen == [longest, *2 * [*3 * [batch.short], longest]]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["scenes", "corpus"])
def test_the_shares_of_all_ranks_are_the_batch_of_one(tmp_path, mini_corpus, source):
    if source == "scenes":
        recipe = tiny(tmp_path)
        encoder = start(recipe).encoder
        whole, *shares = (
            make_loader(recipe, encoder, ranks=ranks) for ranks in (Ranks(), *(Ranks(r, 2) for r in (0, 1)))
        )
    else:
        corpus = read_corpus(sorted(mini_corpus.glob("train-*.tar")), 16, None)
        spec = BatchSpec(image_size=(16, 16), grid=(2, 2), batch_size=4, length_multiple=16)
        packed = pack_corpus(corpus, CaptionTokenizer())
        whole, *shares = (CorpusLoader(packed, spec, ranks=ranks) for ranks in (Ranks(), Ranks(0, 2), Ranks(1, 2)))
    for step in (0, 3):
        batch, parts = whole.batch(step), [share.batch(step) for share in shares]
        assert batch.keys == [key for part in parts for key in part.keys]
        assert torch.equal(batch.regions, torch.cat([part.regions for part in parts]))
        torch.testing.assert_close(batch.images, torch.cat([part.images for part in parts]))
        nodes = torch.cat([part.phrases.node_offsets.diff() for part in parts])
        assert torch.equal(batch.phrases.node_offsets.diff(), nodes)
        for part, rows in zip(parts, batch.tokens.split(2), strict=True):
            assert torch.equal(part.tokens, rows[:, : part.tokens.shape[1]])


def test_an_image_draws_the_same_numbers_on_any_number_of_ranks():
    def draw(rank: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return draw_uniform((12 // count, 2, 5), torch.device("cpu"), generator, Ranks(rank, count))

    for count in (2, 3):
        assert torch.equal(torch.cat([draw(rank, count) for rank in range(count)]), draw(0, 1))


# ---- when something goes wrong ---------------------------------------------------------------------------------------


def test_an_error_that_strikes_all_ranks_is_said_by_the_first_and_one_that_does_not_by_its_own(monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setattr("powerclip.cli.time.sleep", waited.append)
    for rank, said in ((0, "powerclip: error: no shard"), (3, "powerclip: error: rank 3: no shard")):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit):
            fail("no shard")
        assert capsys.readouterr().err.strip() == said
    # Time enough for torchrun to end the third rank, had the first one failed.
    assert waited == [MAIN_RANK_SECONDS]


@pytest.mark.parametrize("command", ["compare", "quickstart"])
def test_commands_for_one_process_say_so_under_torchrun(monkeypatch, command):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=f"powerclip {command} is for one process"):
        app([command, *(["quickstart/clip"] if command == "compare" else [])], standalone_mode=False)


def test_torchrun_trains_and_one_rank_prints(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "powerclip", "train"]
    recipe = ["--recipe", str(write_tiny(tmp_path)), "--output", str(tmp_path / "run"), "train.steps=2"]
    done = subprocess.run(
        [*launcher, *recipe],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(powerclip.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2/2") == 1
    assert (tmp_path / "run" / "results.json").is_file()
