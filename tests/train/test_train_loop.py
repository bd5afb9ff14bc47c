"""Training: it learns, it stops and continues without a trace, and it spoils nothing that is there."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_run import same_weights, tiny, weights

import powerclip
from powerclip.errors import UserError
from powerclip.train import checkpoint
from powerclip.train.loop import train, train_step
from powerclip.train.metrics import read_metrics
from powerclip.train.recipe import Recipe, parse_recipe
from powerclip.train.state import TrainState, start


@pytest.fixture(autouse=True)
def _one_thread():
    # How a sum is split over threads decides its last bits.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stop_after(step: int):
    def stop(state: TrainState) -> None:
        if state.step == step:
            raise KeyboardInterrupt

    return stop


def stopped(recipe: Recipe, output: Path, step: int, **options: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(recipe, output, quiet=True, on_step=stop_after(step), **options)


@pytest.mark.parametrize("objective", ["clip", "powerclip"])
def test_the_loss_falls_and_the_run_folder_holds_what_it_promises(tmp_path, objective):
    recipe = tiny(tmp_path, f"objective={objective}", "train.steps=40", "optim.lr=1e-2", "train.batch_size=8")
    result = train(recipe, tmp_path / "run", quiet=True)
    rows = list(read_metrics(result.folder.metrics))
    assert [row["step"] for row in rows] == [1, *range(2, 41, 2)]
    assert sum(row["loss"] for row in rows[-5:]) < sum(row["loss"] for row in rows[:5])
    assert {"loss", "clip", "lr", "logit_scale", "grad_norm", "samples_per_second"} <= rows[0].keys()
    assert ("violation" in rows[0]) == (objective == "powerclip")
    assert parse_recipe(result.folder.recipe.read_text(), "snapshot") == recipe
    assert [path.name for path in checkpoint.checkpoints(result.folder.checkpoints)] == [
        "step-000030.pt",
        "step-000035.pt",
    ]
    assert any(result.folder.tensorboard.iterdir())
    loaded, _, _ = powerclip.load(result.folder.model)
    assert torch.equal(loaded.clip.text_projection, result.encoder.clip.text_projection)


@pytest.mark.parametrize("objective", ["clip", "powerclip"])
def test_a_run_that_is_stopped_twice_ends_bit_equal_to_one_that_is_not(tmp_path, objective):
    recipe = tiny(tmp_path, f"objective={objective}")
    train(recipe, tmp_path / "whole", quiet=True)
    stopped(recipe, tmp_path / "parts", 7)
    stopped(recipe, tmp_path / "parts", 11, resume=True)
    train(recipe, tmp_path / "parts", quiet=True, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")

    def losses(run: str) -> list[tuple[float, float]]:
        return [(row["step"], row["loss"]) for row in read_metrics(tmp_path / run / "metrics.jsonl")]

    assert losses("whole") == losses("parts")


def test_a_torn_checkpoint_costs_steps_but_not_the_result(tmp_path):
    recipe = tiny(tmp_path)
    stopped(recipe, tmp_path / "run", 11)
    last = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")[-1]
    last.write_bytes(last.read_bytes()[:1000])
    printed = io.StringIO()
    train(recipe, tmp_path / "run", resume=True, quiet=True, console=Console(file=printed))
    assert "step-000010.pt" in printed.getvalue()
    train(recipe, tmp_path / "whole", quiet=True)
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_batches_made_ahead_are_the_batches_made_in_turn(tmp_path):
    train(tiny(tmp_path, "data.workers=0"), tmp_path / "none", quiet=True)
    train(tiny(tmp_path, "data.workers=3"), tmp_path / "three", quiet=True)
    assert same_weights(tmp_path / "none", tmp_path / "three")


def test_a_run_whose_batches_were_drawn_otherwise_says_so_when_it_is_resumed(tmp_path):
    recipe, folder = tiny(tmp_path), tmp_path / "run" / "checkpoints"
    stopped(recipe, tmp_path / "run", 7)
    state = checkpoint.newest(folder, print, required=True)
    state.pop("draws")  # as before there were versions
    checkpoint.write(folder, state.pop("step"), state, keep=1)
    printed = io.StringIO()
    train(recipe, tmp_path / "run", resume=True, quiet=True, console=Console(file=printed, width=300))
    assert "begun with a version of powerclip that drew the order of samples, crops and regions" in printed.getvalue()


def test_a_run_stopped_before_its_first_checkpoint_resumes_from_the_start(tmp_path):
    recipe = tiny(tmp_path)
    stopped(recipe, tmp_path / "run", 3)
    train(recipe, tmp_path / "run", resume=True, quiet=True)
    train(recipe, tmp_path / "whole", quiet=True)
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_run_is_neither_overwritten_nor_resumed_by_mistake(tmp_path):
    recipe, run = tiny(tmp_path, "train.steps=2"), tmp_path / "run"
    with pytest.raises(UserError, match="nothing to resume"):
        train(recipe, run, resume=True)
    assert not run.exists()
    train(recipe, run, quiet=True)
    before = weights(run)
    with pytest.raises(UserError, match="finished run; use --overwrite"):
        train(recipe, run)
    with pytest.raises(UserError, match=r"another recipe .*optim.lr: 0.001 → 0.5"):
        train(tiny(tmp_path, "train.steps=2", "optim.lr=0.5"), run, resume=True)
    again = train(recipe, run, resume=True, quiet=True)  # finished: nothing to do
    assert torch.equal(again.encoder.clip.text_projection, before["text_projection"])
    (run / "notes.txt").write_text("mine")
    train(tiny(tmp_path, "train.steps=2", "train.seed=1"), run, overwrite=True, quiet=True)
    assert not torch.equal(weights(run)["text_projection"], before["text_projection"])
    assert (run / "notes.txt").read_text() == "mine"


def test_an_unfinished_run_points_to_resume(tmp_path):
    stopped(tiny(tmp_path), tmp_path / "run", 2)
    with pytest.raises(UserError, match="unfinished run; use --resume"):
        train(tiny(tmp_path), tmp_path / "run")


def test_a_folder_that_is_no_run_is_left_alone_even_with_overwrite(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("cat")
    with pytest.raises(UserError, match="not a run"):
        train(tiny(tmp_path), tmp_path / "photos", overwrite=True)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


@pytest.mark.parametrize(
    "override",
    ["model.config.vision_cfg.hed_width=8", "model.pretrained=gone.pt", "train.device=gpu", "train.device=cuda:99"],
)
def test_what_is_wrong_with_a_recipe_shows_before_anything_is_written(tmp_path, override):
    with pytest.raises(UserError):
        train(tiny(tmp_path, override), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_backend_that_cannot_run_here_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"alignment\.backend: triton .*; use auto, torch or reference") as caught:
        train(tiny(tmp_path, "alignment.backend=triton"), tmp_path / "run", quiet=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_backend_that_the_objective_does_not_use_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    recipe = tiny(tmp_path, "objective=clip", "alignment.backend=triton", "train.steps=1")
    assert train(recipe, tmp_path / "run", quiet=True).folder.finished


def test_a_run_that_was_finished_on_a_gpu_can_be_read_without_one(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    train(tiny(tmp_path, "train.steps=1"), tmp_path / "run", quiet=True)
    noted = tmp_path / "run" / "recipe.yaml"
    assert "backend: auto" in noted.read_text()
    noted.write_text(noted.read_text().replace("backend: auto", "backend: triton"))
    recipe = tiny(tmp_path, "train.steps=1", "alignment.backend=triton")
    assert train(recipe, tmp_path / "run", resume=True, quiet=True).results.steps == 1


def test_a_loss_that_is_not_finite_stops_the_run_and_spoils_no_checkpoint(tmp_path):
    def poison(state: TrainState) -> None:
        if state.step == 6:
            with torch.no_grad():
                state.encoder.clip.text_projection.fill_(float("nan"))

    with pytest.raises(UserError, match="diverged at step 7"):
        train(tiny(tmp_path), tmp_path / "run", quiet=True, on_step=poison)
    assert not (tmp_path / "run" / "model").exists()
    train(tiny(tmp_path), tmp_path / "run", quiet=True, resume=True)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


def test_scales_stay_at_one_hundred_or_below(tmp_path):
    from powerclip.train.data import make_loader

    recipe = tiny(tmp_path)
    state = start(recipe)
    with torch.no_grad():
        state.encoder.clip.logit_scale.fill_(9.0)
    train_step(state, make_loader(recipe, state.encoder).batch(0), recipe)
    assert state.encoder.clip.logit_scale.exp().item() == pytest.approx(100)


def test_a_limit_on_the_gradient_is_kept(tmp_path):
    from powerclip.train.data import make_loader

    recipe = tiny(tmp_path, "optim.grad_clip=0.01")
    state = start(recipe)
    train_step(state, make_loader(recipe, state.encoder).batch(0), recipe)
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    assert torch.nn.utils.get_total_norm([p.grad for p in parameters]) <= 0.0101


def test_evaluation_on_the_way_is_logged_and_leaves_training_untouched(tmp_path):
    def evaluate(encoder: torch.nn.Module) -> dict[str, float]:
        assert not encoder.training
        return {"chance": float(torch.rand(()))}

    train(tiny(tmp_path), tmp_path / "without", quiet=True)
    train(tiny(tmp_path, "train.evaluate_every=5"), tmp_path / "with", quiet=True, evaluate=evaluate)
    rows = read_metrics(tmp_path / "with" / "metrics.jsonl")
    assert [row["step"] for row in rows if "evaluate/chance" in row] == [5, 10, 12]
    assert same_weights(tmp_path / "without", tmp_path / "with")


def test_bf16_trains_and_its_loss_stays_near_that_of_float32(tmp_path):
    for precision in ("float32", "bf16"):
        train(tiny(tmp_path, f"train.precision={precision}"), tmp_path / precision, quiet=True)
    one, other = (next(read_metrics(tmp_path / name / "metrics.jsonl"))["loss"] for name in ("float32", "bf16"))
    assert one == pytest.approx(other, rel=0.02)
    assert one != other


def test_off_a_terminal_a_run_prints_one_line_for_each_logged_step(tmp_path):
    printed = io.StringIO()
    train(tiny(tmp_path), tmp_path / "run", console=Console(file=printed, width=40))
    lines = printed.getvalue().splitlines()
    assert len(lines) == 8  # steps 1, 2, 4, …, 12 and the end
    assert all(word in lines[3] for word in ("6/12", "loss", "clip", "alignment", "samples/s", "eta"))
    assert "finished" in lines[-1]


def test_quiet_prints_nothing_and_a_terminal_shows_a_bar(tmp_path):
    printed = io.StringIO()
    train(tiny(tmp_path), tmp_path / "quiet", quiet=True, console=Console(file=printed))
    assert printed.getvalue() == ""
    train(tiny(tmp_path), tmp_path / "bar", console=Console(file=printed, force_terminal=True, width=160))
    assert "12/12" in printed.getvalue()
    assert "samples/s" in printed.getvalue()


def test_a_seed_may_be_of_any_size(tmp_path):
    train(tiny(tmp_path, "train.steps=1", f"train.seed={10**30}"), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "results.json").is_file()


def test_a_run_whose_recipe_is_no_text_any_more_is_not_continued(tmp_path):
    recipe = tiny(tmp_path)
    stopped(recipe, tmp_path / "run", 6)
    (tmp_path / "run" / "recipe.yaml").write_bytes(b"\xff\x80")
    with pytest.raises(UserError, match=r"recipe\.yaml: not a text file"):
        train(recipe, tmp_path / "run", quiet=True, resume=True)


def test_a_gpu_that_is_full_is_one_line_that_says_what_helps(tmp_path):
    def full(state: TrainState) -> None:
        if state.step == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    recipe = tiny(tmp_path, "train.steps=10")
    with pytest.raises(UserError, match=r"memory ran out.*train\.batch_size.*train\.accumulate"):
        train(recipe, tmp_path / "run", quiet=True, on_step=full)
    assert train(recipe, tmp_path / "run", quiet=True, resume=True).results.steps == 10  # what was saved is not lost
