"""Ranks and devices: collectives with their gradients, and errors that reach every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from spawned_ranks import spawn_ranks
from torch import Tensor

from powerclip.errors import UserError
from powerclip.objectives.a_clip import batch_norm
from powerclip.runtime.distributed import Ranks, choose_device, join_ranks


def messages(folder: Path, values: Tensor) -> dict[str, Tensor]:
    """What each message gives this rank of `values` [n, c, D], and the gradient of its own row of them."""
    with join_ranks("cpu") as ranks:
        found: dict[str, Tensor] = {}
        for name in ("gather", "sum", "mean", "logsumexp"):
            own = values[ranks.rank].clone().requires_grad_()
            result = getattr(ranks, name)(own)
            (result * torch.arange(1.0, 1 + result.numel()).view_as(result)).sum().backward()
            found[name], found[f"gradient of {name}"] = result.detach(), own.grad
        found["max"] = ranks.max(values[ranks.rank])
        found["exchange"] = ranks.exchange(values[ranks.rank].repeat(ranks.count, 1))
        found["truth"] = ranks.gather(values[ranks.rank] > 0)
        norm = torch.nn.BatchNorm1d(values.shape[-1])
        own = values[ranks.rank].clone().requires_grad_()
        normal = batch_norm(norm, own, ranks)
        normal.square().mul(torch.arange(values.shape[-1])).sum().backward()
        found |= {"normal": normal.detach(), "gradient of normal": own.grad}
        return found | {"running mean": norm.running_mean, "running variance": norm.running_var}


def test_messages_and_their_gradients_are_those_of_the_tensors_they_stand_for(tmp_path):
    values = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
    answers = spawn_ranks(3, messages, tmp_path, values)
    whole = values.clone().requires_grad_()
    results = {
        "gather": whole.flatten(0, 1),
        "sum": whole.sum(0),
        "mean": whole.mean(0),
        "logsumexp": whole.logsumexp(0),
    }
    for name, result in results.items():
        weight = torch.arange(1.0, 1 + result.numel()).view_as(result)
        # All three ranks use what they share.
        (gradient,) = torch.autograd.grad(3 * (result * weight).sum(), whole)
        for rank, answer in enumerate(answers):
            torch.testing.assert_close(answer[name], result.detach())
            torch.testing.assert_close(answer[f"gradient of {name}"], gradient[rank])
    norm = torch.nn.BatchNorm1d(2)
    normal = norm(whole.flatten(0, 1))
    (gradient,) = torch.autograd.grad(normal.square().mul(torch.arange(2)).sum(), whole)
    for rank, answer in enumerate(answers):
        assert torch.equal(answer["max"], values.amax(0))
        assert torch.equal(answer["truth"], values.flatten(0, 1) > 0)
        assert torch.equal(answer["exchange"], values)
        torch.testing.assert_close(answer["normal"], normal.detach().view_as(values)[rank])
        torch.testing.assert_close(answer["gradient of normal"], gradient[rank], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(answer["running mean"], norm.running_mean)
        torch.testing.assert_close(answer["running variance"], norm.running_var)


def disagree(folder: Path) -> str:
    """The second rank cannot do what both are asked to."""

    def act() -> None:
        if ranks.rank == 1:
            raise UserError("the shard is gone")

    try:
        with join_ranks("cpu") as ranks:
            ranks.raise_on_all(act)
    except UserError as error:
        return f"said: {error}"
    except SystemExit as left:
        return f"left with {left.code}"
    return "went on"


def lose_one(folder: Path) -> str:
    """The second rank leaves while the first waits for it."""
    if os.environ["RANK"] == "1":
        with join_ranks("cpu") as ranks:
            ranks.numbers(0)
        return "left"
    try:
        with join_ranks("cpu") as ranks:
            ranks.numbers(0)
            ranks.numbers(1)
    except UserError as error:
        return str(error)
    return "was answered"


def test_what_fails_on_one_rank_fails_on_all_and_the_first_says_it(tmp_path):
    assert spawn_ranks(3, disagree, tmp_path) == ["said: rank 1: the shard is gone", "left with 0", "left with 0"]


def test_a_rank_that_leaves_does_not_keep_the_others_waiting(tmp_path):
    first, second = spawn_ranks(2, lose_one, tmp_path)
    assert "lost the connection" in first
    assert second == "left"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have names here only on Linux")
def test_no_thread_of_the_processes_outlives_their_group():
    # One that does can abort Python's exit. open_clip is imported late, as commands do.
    script = """
from pathlib import Path
import powerclip.runtime.distributed
import torch
from torch import distributed as dist

def threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import open_clip
dist.all_reduce(torch.ones(1))
assert threads()
dist.destroy_process_group()
print(threads())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_one_gpu_is_not_enough_for_several_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto", Ranks(1, 2, 1)) == torch.device("cuda:1")
    with pytest.raises(UserError, match="cuda:1 is one GPU, and there are 2 ranks"):
        choose_device("cuda:1", Ranks(0, 2))
    with pytest.raises(UserError, match=r"more processes on this machine than it has GPUs \(2\)"):
        choose_device("cuda", Ranks(2, 3, 2))
