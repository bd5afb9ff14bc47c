"""Sharded towers, real processes over gloo: hybrid groups, mixed precision, and checkpoints that each rank writes."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from rank_workers import BF16, PARTS, STEADY, alone, sharded_ways
from spawned_ranks import spawn_ranks
from tiny_run import tiny, weights
from torch import Tensor

from powerclip.errors import UserError
from powerclip.runtime.checkpoint_file import BadCheckpoint
from powerclip.runtime.distributed import SINGLE
from powerclip.train import sharded_checkpoint
from powerclip.train.loop import train
from powerclip.train.parallel import shard_count
from powerclip.train.state import start


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """What two ranks find, then four; and the folder of a run that two began and four finished, as two left it."""
    folder = tmp_path_factory.mktemp("sharded")
    two = spawn_ranks(2, sharded_ways, folder / "two", folder, 2)
    shutil.copytree(folder / "parts", folder / "of two")
    four = spawn_ranks(4, sharded_ways, folder / "four", folder, 4)
    return two, four, folder


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(tiny(folder, STEADY), folder / "run", quiet=True)
    return folder / "run"


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for name, value in expected.items() if name.startswith("gradient"))
    for name, value in expected.items():
        scale = largest if name.startswith("gradient") else value.abs().max().clamp(min=1)
        torch.testing.assert_close(
            found[name].float() / scale,
            value.float() / scale,
            rtol=0,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_groups_that_hold_a_copy_each_give_the_loss_and_the_gradients_of_one_process(ways, tmp_path):
    expected = alone(tmp_path, "powerclip")
    for answers in ways[:2]:  # one group of two ranks, and two groups
        assert_near(answers[0]["hybrid"]["powerclip"], expected, 1e-4)


def test_weights_gathered_in_bf16_give_what_bf16_towers_give_but_for_its_rounding(ways, tmp_path):
    found, expected = ways[0][0]["mixed"]["powerclip"], alone(tmp_path, "powerclip", *BF16)
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=0.02)
    assert found["loss"] != expected["loss"]  # the policy is at work: normalisations compute in bf16 as well
    names = [name for name in expected if name.startswith("gradient")]
    one, other = (torch.cat([values[name].flatten() for name in names]) for values in (found, expected))
    assert one.dtype == torch.float32  # AdamW steps in full precision
    assert torch.cosine_similarity(one, other, dim=0) > 0.99


def test_a_run_whose_ranks_wrote_their_parts_continues_on_more_ranks_and_on_one(ways, whole_run, tmp_path):
    folder = ways[2]
    (path,) = sharded_checkpoint.checkpoint_folders(folder / "of two" / "checkpoints")
    assert path.name == "step-000005"
    assert len(list(path.glob("*.distcp"))) == 2
    shutil.copytree(folder / "of two", tmp_path / "run")
    train(tiny(tmp_path, STEADY), tmp_path / "run", quiet=True, resume=True)
    for run in (tmp_path / "run", folder / "parts"):
        for name, value in weights(whole_run).items():
            torch.testing.assert_close(weights(run)[name], value, rtol=0, atol=1e-4)


def test_one_process_writes_and_continues_them_bit_equal(whole_run, tmp_path):
    recipe = tiny(tmp_path, *PARTS, "train.keep=1")

    def stop(state):
        if state.step == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run", quiet=True, on_step=stop)
    (path,) = sharded_checkpoint.checkpoint_folders(tmp_path / "run" / "checkpoints")
    assert path.name == "step-000010"
    train(tiny(tmp_path, STEADY), tmp_path / "run", quiet=True, resume=True)
    a, b = weights(tmp_path / "run"), weights(whole_run)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_truncated_part_is_refused_and_the_checkpoint_before_it_is_used(tmp_path):
    state = start(tiny(tmp_path))
    folder = tmp_path / "checkpoints"
    for state.step in (5, 10):
        path = sharded_checkpoint.write(folder, state, {"guard": {}}, 2, SINGLE)
    (part,) = path.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-100])
    told: list[str] = []
    saved, parts = sharded_checkpoint.newest_state(folder, told.append, SINGLE, required=True)
    assert parts == folder / "step-000005"
    assert saved["step"] == 5
    assert "truncated; going back" in told[0]
    assert (folder / "step-000010.refused").is_dir()
    (folder / "step-000005" / sharded_checkpoint.RUN_FILE).write_bytes(b"torn")
    with pytest.raises(UserError, match="no good checkpoint is left: start again with --overwrite"):
        sharded_checkpoint.newest_state(folder, told.append, SINGLE, required=True)


def test_a_list_that_would_run_code_is_refused_before_torch_reads_it(tmp_path):
    path = sharded_checkpoint.write(tmp_path / "checkpoints", start(tiny(tmp_path)), {"guard": {}}, 2, SINGLE)
    listed, size = path / ".metadata", (path / ".metadata").stat().st_size
    listed.write_bytes(pickle.dumps(Path).ljust(size, b"."))  # names a class that no list has
    with pytest.raises(BadCheckpoint, match="it names pathlib"):
        sharded_checkpoint.read(path)


def test_settings_that_change_nothing_or_do_not_fit_are_refused(tmp_path):
    for wrong, expected in (
        ("train.mixed_precision_param=bf16", "train.mixed_precision_param is for sharded weights"),
        ("train.shard_ranks=2", "train.shard_ranks is the size of a group"),
    ):
        with pytest.raises(UserError, match=expected):
            tiny(tmp_path, wrong)
    groups = tiny(tmp_path, "train.sharding=hybrid", "train.shard_ranks=3").train
    assert shard_count(groups, 6) == 3
    with pytest.raises(UserError, match="4 ranks are no whole number of groups of 3"):
        shard_count(groups, 4)
