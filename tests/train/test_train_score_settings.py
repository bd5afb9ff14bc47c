"""`--score` takes what the model's run was trained with, and what is asked for above it."""

from __future__ import annotations

import pytest
from tiny_run import tiny

from powerclip.alignment.config import AlignmentConfig
from powerclip.errors import UserError
from powerclip.train.run_folder import RunFolder
from powerclip.train.score_settings import score_settings


def run(folder, *overrides):
    """A folder as a run leaves it, less the weights."""
    run = RunFolder(folder / "run")
    run.begin(tiny(folder, *overrides))
    run.model.mkdir()
    run.checkpoints.mkdir()
    (run.checkpoints / "step-000010.pt").touch()
    return run


def test_a_runs_model_is_scored_as_it_was_trained(tmp_path):
    folder = run(tmp_path, "alignment.largest_set=0", "regions.largest=0.5", "nodes=all")
    for model in (folder.root, folder.model, folder.checkpoints / "step-000010.pt", f"local-dir:{folder.model}"):
        settings = score_settings(str(model), "powerset")
        assert (settings.boxes, settings.largest, settings.nodes) == (3, 0.5, "all")
        assert settings.alignment == AlignmentConfig(largest_set=0)
    elsewhere = score_settings("ViT-B-16", "powerset")
    assert (elsewhere.boxes, elsewhere.alignment) == (10, AlignmentConfig())


def test_what_is_asked_for_counts_above_the_run(tmp_path):
    model = str(run(tmp_path, "alignment.largest_set=0", "alignment.tau=0.01").root)
    settings = score_settings(model, "powerset", boxes="3x3", alignment=["r2t=false"])
    assert (settings.grid, settings.regions) == (3, 36)
    assert settings.alignment == AlignmentConfig(largest_set=0, tau=0.01, r2t=False)
    printed = score_settings(model, "powerset", boxes="5", alignment=["preset=paper", "empty_set=false"])
    assert printed.alignment == AlignmentConfig.named("paper", empty_set=False)
    assert printed.regions == 5


def test_filips_tokens_are_those_of_its_run(tmp_path):
    model = run(tmp_path, "objective=filip", "objective_settings.ends=false")
    assert not score_settings(str(model.model), "late", rerank=7).ends
    # Its alignment is no setting of FILIP's.
    assert score_settings(str(model.model), "powerset").alignment == AlignmentConfig()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "late", "boxes": "3"}, "--boxes and --alignment belong to --score powerset"),
        ({"score": "powerset", "boxes": "3x4"}, "'3x4' is neither a number of random boxes"),
        ({"score": "powerset", "boxes": "9x9"}, "a grid of at most 8x8"),
        ({"score": "powerset", "alignment": ["tau"]}, "'tau' is not key=value"),
        ({"score": "powerset", "alignment": ["taus=1"]}, "unknown key"),
        ({"score": "powerset", "alignment": ["r2t=false", "t2r=false"]}, "nothing is left to align"),
        ({"score": "powersets"}, "there are global, late, powerset"),
    ],
)
def test_a_mistake_is_one_line(options, message):
    with pytest.raises(UserError, match=message):
        score_settings("ViT-B-16", **options)


def test_separate_projections_cannot_be_scored(tmp_path):
    model = run(tmp_path, "alignment.projection=separate")
    with pytest.raises(UserError, match="does not hold those matrices"):
        score_settings(str(model.model), "powerset")
    assert score_settings(str(model.model), "late").score == "late"
