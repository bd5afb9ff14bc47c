"""A step that is not finite changes nothing, is counted, and a run that cannot recover stops and says why."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_run import tiny, weights
from torch import nn

from powerclip.errors import UserError
from powerclip.objectives import Clip, Terms
from powerclip.train.guard import Guard, mark_loss, not_finite, step_if_finite
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.state import TrainState

BAD = [math.nan, math.inf, -math.inf]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def model(device: str = "cpu") -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(device)


def adamw(module: nn.Module, **options: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5, **options)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_is_not_finite_leaves_weights_moments_and_counts_as_they_were(options, bad, device):
    module = model(device)
    optimizer = adamw(module, **options)

    def update(value: float) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, value)
        step_if_finite(optimizer, torch.tensor(value, device=device))

    update(1.0)
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict()["state"]))
    update(bad)
    after = (module.state_dict(), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    update(1.0)
    assert not torch.equal(module.weight, before[0]["weight"])


def test_without_a_bad_step_the_guarded_update_is_the_plain_one():
    guarded, plain = model(), model()
    one, other = adamw(guarded, fused=True), adamw(plain, fused=True)
    for seed in range(3):
        for module in (guarded, plain):
            torch.manual_seed(seed)
            module.zero_grad()
            total = module(torch.randn(4, 3)).square().sum()
            (mark_loss(total) if module is guarded else total).backward()
        step_if_finite(one, torch.tensor(1.0))
        other.step()
    assert torch.equal(guarded.weight, plain.weight)


@pytest.mark.parametrize("bad", BAD)
def test_a_loss_that_is_not_finite_makes_every_gradient_so(bad):
    weight = torch.ones(3, requires_grad=True)
    mark_loss(weight.sum() + bad).backward()  # the gradient alone would be 1
    assert weight.grad.isnan().all()


def terms(value: float, device: str = "cpu") -> Terms:
    found = torch.tensor(value, device=device)
    return Terms(found, {"clip": found})


def guard(most: int, warnings: list[str], module: nn.Module | None = None) -> Guard:
    return Guard(most, (module or model(),), warnings.append)


@pytest.mark.parametrize("device", DEVICES)
def test_each_row_of_bad_steps_is_warned_of_once_and_all_are_counted(device):
    warnings: list[str] = []
    watched = guard(3, warnings)
    for step, value in enumerate([1.0, math.nan, math.nan, 1.0, math.inf, 1.0]):
        watched.check(step, terms(value, device), torch.tensor(1.0, device=device))
    watched.flush()  # a GPU is checked two steps later
    assert watched.skipped == 3
    assert len(warnings) == 2
    assert "step 1: loss nan" in warnings[0]
    assert "clip inf" in warnings[1]


def test_more_bad_steps_in_a_row_than_allowed_stop_the_run_with_what_is_wrong():
    module = model()
    module.bias.grad = torch.full((2,), math.nan)
    watched = guard(2, [], module)
    watched.check(1, terms(1.0), torch.tensor(math.nan))
    watched.check(2, terms(1.0), torch.tensor(math.nan))
    with pytest.raises(
        UserError, match=r"3 updates in a row, up to step 3.*gradients that are not finite: bias"
    ) as caught:
        watched.check(3, terms(1.0), torch.tensor(math.nan))
    assert all(word in str(caught.value) for word in ("optim.lr", "train.max_skipped", "weights are finite"))


def test_weights_that_are_not_finite_stop_the_run_at_once():
    module = model()
    with torch.no_grad():
        module.weight[0, 0] = math.nan
    assert not_finite([module]) == ["weight"]
    with pytest.raises(UserError, match=r"diverged at step 7.*no longer finite: weight"):
        guard(5, [], module).check(7, terms(math.nan), torch.tensor(math.nan))


def test_a_guard_goes_on_counting_after_a_checkpoint():
    first, second = guard(3, []), guard(3, [])
    for step in (1, 2, 3):
        first.check(step, terms(math.nan), torch.tensor(1.0))
    second.restore(first.snapshot())
    assert second.skipped == 3
    with pytest.raises(UserError, match="4 updates in a row"):
        second.check(4, terms(math.nan), torch.tensor(1.0))


def test_training_goes_on_after_a_bad_step_and_the_log_counts_it(tmp_path, monkeypatch):
    losses = Clip.loss
    calls = iter(range(100))

    def poisoned(self: Clip, *arguments: object) -> Terms:
        found = losses(self, *arguments)
        return Terms(found.total * math.nan, found.parts) if next(calls) in (4, 5) else found

    monkeypatch.setattr(Clip, "loss", poisoned)
    seen: dict[int, torch.Tensor] = {}

    def remember(state: TrainState) -> None:
        seen[state.step] = state.encoder.clip.text_projection.detach().clone()

    recipe = tiny(tmp_path, "objective=clip", "train.log_every=1")
    train(recipe, tmp_path / "run", quiet=True, on_step=remember)
    assert torch.equal(seen[4], seen[5])
    assert torch.equal(seen[5], seen[6])
    assert not torch.equal(seen[6], seen[7])
    skipped = [row["skipped"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert skipped == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())
