"""What decides a detector's training, checked and written beside its run as other recipes are."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    build,
    check,
    parse_yaml,
    to_yaml,
    validate,
)
from powerclip.train.run_folder import RunFolder
from powerclip.train.sections import OptimSection

SCENES = "scenes"  # as data: embedded scenes


@dataclass(frozen=True)
class DetectRecipe:
    """Everything that decides a detector's training."""

    model: str  # the towers, as every command names them
    pretrained: str | None = None  # with an open_clip name, the tag of its weights
    data: str = SCENES  # a COCO file, or scenes
    images: list[str] = field(default_factory=list)  # folders and tars with the file's images; none: beside it
    scenes: PositiveInt = 2000  # how many, where the data are scenes
    size: PositiveInt = 448  # pixels of an image's longer side
    width: PositiveInt = 256  # channels of the pyramid
    hidden: PositiveInt = 1024  # of the two layers behind a pooled box
    steps: PositiveInt = 3000  # updates
    batch_size: PositiveInt = 16  # images of a batch
    lr: Share = 5e-4  # peak learning rate of what is new
    weight_decay: NonNegativeFloat = 0.05
    warmup: NonNegativeInt = 100  # steps of linear warm-up
    grad_clip: PositiveFloat = 10.0  # largest norm of the gradient
    tune: NonNegativeFloat = 0.0  # learning rate of the image tower; 0: it stays as it is
    seed: NonNegativeInt = 0  # of the weights, the order of images, their flips and the boxes that are sampled
    # of the tower in the scores of base and novel classes; none: chosen on base classes, some of which are held out
    exponents: list[float] = field(default_factory=list)
    calibration_steps: NonNegativeInt = 0  # updates of the detector that they are chosen with; 0: half of `steps`

    def __post_init__(self) -> None:
        try:
            validate(self)
        except ValueError as error:
            raise UserError(str(error)) from None
        if self.exponents and (len(self.exponents) != 2 or not all(0 <= one <= 1 for one in self.exponents)):
            raise UserError(
                f"exponents are two shares, of base and of novel classes, such as 0.2,0.45, not {self.exponents}"
            )
        if self.warmup > self.steps:
            raise UserError(f"the warm-up of {self.warmup:,} steps is longer than the run of {self.steps:,}")

    @property
    def optim(self) -> OptimSection:
        """The optimiser's settings."""
        return OptimSection(lr=self.lr, weight_decay=self.weight_decay, beta2=0.999, warmup=self.warmup)


class DetectFolder(RunFolder):
    """The folder of a detector: a run's files, and beside them what was learned and the detector that chose exponents.

    `detect.yaml` instead of `recipe.yaml`; `model/` is the tower, so that the folder is complete by itself.
    """

    @property
    def recipe(self) -> Path:
        """The recipe as it was run."""
        return self.root / "detect.yaml"

    @property
    def weights(self) -> Path:
        """What was learned beside the tower."""
        return self.root / "detector.safetensors"

    @property
    def about(self) -> Path:
        """Its sizes, classes and exponents."""
        return self.root / "detector.json"

    @property
    def calibration(self) -> DetectFolder:
        """Where the exponents were chosen."""
        return DetectFolder(self.root / "calibration")

    @property
    def exponents(self) -> Path:
        """In the folder of a calibration: what was chosen, and how."""
        return self.root / "exponents.json"

    def open_run(self, recipe: DetectRecipe, *, resume: bool, overwrite: bool) -> bool:
        """Begin a run here, or say that one goes on.

        Raises:
            UserError: the folder holds another run, or none to resume.
        """
        if not resume:
            self.check_free(overwrite=overwrite)
            self.clear()
            for path in (self.weights, self.about):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.calibration.root, ignore_errors=True)
            write_atomic(self.recipe, to_yaml(asdict(recipe)).encode())
            return False
        if not self.holds_run():
            raise UserError(f"nothing to resume in {self.root}; leave --resume out to begin a run there")
        before, after = asdict(self.read()), asdict(recipe)
        changed = [f"{key}: {before[key]} → {value}" for key, value in after.items() if before[key] != value]
        if changed:
            raise UserError(f"cannot resume {self.root} with other settings ({'; '.join(changed[:3])})")
        return True

    def read(self) -> DetectRecipe:
        """The recipe that the run here was begun with.

        Raises:
            UserError: its file is damaged or of another version.
        """
        where = str(self.recipe)
        try:
            text = self.recipe.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{where}: not a text file; the run has to start again with --overwrite") from None
        return build(DetectRecipe, check(parse_yaml(text, where), DetectRecipe, where))
