"""The folder of a run: its files, and when a run may begin, continue or replace another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.runtime.locks import LOCK_FILE, FolderLock
from powerclip.train.recipe import Recipe, differences, dump, parse_recipe


@dataclass(frozen=True)
class RunFolder:
    """What a run writes.

    `recipe.yaml`, `environment.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/` and, once it is finished,
    `model/` and `results.json`; `.lock` while it runs.
    """

    root: Path

    @property
    def recipe(self) -> Path:
        """The recipe as it was run, with every default spelled out."""
        return self.root / "recipe.yaml"

    @property
    def environment(self) -> Path:
        """The machine, the versions and the revision of the code: one entry for each start of the run."""
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line for each logged step."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files for tensorboard."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """Where an unfinished run continues from."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model as an open_clip directory."""
        return self.root / "model"

    @property
    def results(self) -> Path:
        """The scores of the trained model. It is written last: where it is, the run is finished."""
        return self.root / "results.json"

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last step."""
        return self.results.is_file()

    def is_empty(self) -> bool:
        """Whether there is nothing here, or no folder; the lock of a run that was killed at once does not count."""
        return not self.root.exists() or all(path.name == LOCK_FILE for path in self.root.iterdir())

    def lock(self, warn: Callable[[str], None] | None = None) -> FolderLock:
        """Keep other processes out of the folder; UserError when one works here."""
        self._check_folder()
        return FolderLock(self.root, warn)

    def _check_folder(self) -> None:
        if self.root.exists() and not self.root.is_dir():
            raise UserError(f"{self.root} is a file; choose another --output folder")

    def check_free(self, *, overwrite: bool) -> None:
        """UserError when the folder holds something that a new run must not replace."""
        self._check_folder()
        if self.is_empty():
            return
        if not self.recipe.is_file():
            raise UserError(f"{self.root} is not empty and not a run; choose another --output folder")
        if not overwrite:
            state = "a finished" if self.finished else "an unfinished"
            resume = "" if self.finished else "--resume to continue it, "
            raise UserError(
                f"{self.root} holds {state} run; use {resume}--overwrite to replace it, or another --output folder"
            )

    def begin(self, recipe: Recipe) -> None:
        """Make the folder, clear it of an earlier run, and note the recipe."""
        self.clear()
        write_atomic(self.recipe, dump(recipe).encode())

    def clear(self) -> None:
        """Make the folder, and remove what an earlier run has written."""
        # The results first: a half-cleared folder must not look like a finished run. Only what a run writes goes.
        self.results.unlink(missing_ok=True)
        for path in (self.model, self.checkpoints, self.tensorboard):
            shutil.rmtree(path, ignore_errors=True)
        for file in (self.metrics, self.environment):
            file.unlink(missing_ok=True)
        self.root.mkdir(parents=True, exist_ok=True)

    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self.recipe.is_file()

    def read_recipe(self) -> Recipe:
        """The recipe that the run here was started with; UserError when its file is damaged or of another version."""
        try:
            text = self.recipe.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.recipe}: not a text file; the run has to start again with --overwrite") from None
        return parse_recipe(text, str(self.recipe))

    def should_resume(self, recipe: Recipe, resume: bool | Literal["auto"], *, overwrite: bool) -> bool:
        """Whether the run here is continued; UserError when it can neither be continued nor begun."""
        resume = self.holds_run() if resume == "auto" else resume
        if resume:
            self.check_same(recipe, steps_known=False)
        else:
            self.check_free(overwrite=overwrite)
        return resume

    def continues(self, recipe: Recipe) -> bool:
        """Whether `--resume` with this recipe would go on with the run here: it is unfinished and the same."""
        try:
            self.check_same(recipe, steps_known=False)
        except (UserError, OSError):
            return False
        return not self.finished

    def check_same(self, recipe: Recipe, *, steps_known: bool = True) -> None:
        """UserError unless this folder's run was begun with a recipe that computes the same as `recipe`.

        `steps_known` says whether the steps that follow from epochs were counted yet.
        """
        if not self.recipe.is_file():
            raise UserError(f"nothing to resume in {self.root}; leave --resume out to begin a run there")
        changed = differences(self.read_recipe(), recipe, counted=steps_known)
        if changed:
            shown = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
            raise UserError(f"cannot resume {self.root} with another recipe ({shown})")
