"""The sections of a recipe: what can be set, within which bounds, and what each setting means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from powerclip.alignment.regions import DrawnRegions
from powerclip.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    Share,
    validate,
)

# What `evaluation.scenes: true` means.
DEFAULT_SCENES = 500

TOWERS = ("image", "text")  # as train.freeze names them
REDRAWN = (*TOWERS, "heads")  # as model.redraw names what is drawn anew

# As data.trees: every caption is one phrase; only stored trees are read.
FLAT, SIDECARS = "flat", "sidecars"


@dataclass(frozen=True)
class ModelSection:
    """Which towers: a model by name, an open_clip model config written out, or those that the weights come with."""

    name: str | None = None  # an open_clip model, such as ViT-B-16, or any model as in pretrained
    config: dict[str, Any] | None = None  # instead of a name: open_clip's embed_dim, vision_cfg and text_cfg
    # the weights: an open_clip tag or a file, for the name; or a folder, a run, a checkpoint, hf-hub:ORG/NAME or
    # NAME/TAG, which need no name; null: random weights
    pretrained: str | None = None
    # what of the pretrained model is drawn anew from train.seed: image or text, a whole tower, heads, both projections
    redraw: str | None = None

    def __post_init__(self) -> None:
        validate(self, "model")
        if self.name is not None and self.config is not None:
            raise ValueError("give either model.name or model.config (both are set; null unsets one)")
        if self.name is None and self.config is None and self.pretrained is None:
            raise ValueError("give either model.name or model.config, or model.pretrained alone (none is set)")
        if self.redraw is not None and self.name is None and self.pretrained is None:
            raise ValueError("model.redraw is for pretrained weights: set model.pretrained as well")
        parse_redraw(self.redraw)


@dataclass(frozen=True)
class DataSection:
    """Where the pairs come from."""

    # corpus: shards kept in memory; shards: read as needed; table: a file of paths and captions, or a folder
    source: Literal["scenes", "corpus", "shards", "table"] = "scenes"
    shards: str | None = None  # paths, patterns, braces or @list; environment variables in them are expanded
    table: str | None = None  # a CSV, TSV, JSONL or parquet file, a pattern, or a folder of NAME.jpg and NAME.txt
    image: str | None = None  # of a table: the column with images' paths, by its head or number; null: by known heads
    captions: str | None = None  # of a table: the columns with captions, with commas between them; null: by known heads
    # null: sidecars, and the embedded parser where there are none; sidecars: these only; flat: one phrase a caption; of
    # a corpus also a TSV file
    trees: str | None = None
    sidecars: str | None = None  # the folder of annotations and indices; null: beside the data
    cache: str | None = None  # folder of remote shards' copies, null: in the user's cache; of scenes: of what is drawn
    cache_size: PositiveFloat = 100.0  # of remote shards: gigabytes that their copies may take
    crop: PositiveShare = 0.9  # smallest share of an image that a crop keeps
    seed: NonNegativeInt = 0  # decides the order of the samples, or which scenes are drawn
    window: PositiveInt = 8  # of shards, and of a table's parts of 10,000 images: how many are shuffled together
    # threads that prepare batches ahead, 0: none; processes for shards, tables and, from 2, scenes
    workers: NonNegativeInt = 1
    collective: Share = 0.0  # of scenes: share with phrases for several objects ("both stars"); then sets are evaluated
    strict: bool = False  # of shards and tables: what is wrong with a sample or its annotation ends the run
    max_bad: Share = 0.1  # of shards and tables: largest share of samples, and of shards, that may be unusable
    samples: PositiveInt | None = None  # pairs in an epoch, for train.epochs; null: as many as are found

    def __post_init__(self) -> None:
        validate(self, "data")
        if self.source == "corpus" and not self.shards:
            raise ValueError("data.source is corpus: set data.shards to its tar files (for example data/train-*.tar)")
        if self.source == "corpus" and self.shards and "://" in self.shards:
            raise ValueError("data.source: corpus reads local shards; data.source: shards reads remote ones")
        if self.source == "shards" and not self.shards:
            raise ValueError("data.source is shards: set data.shards to them (for example /data/{00000..01242}.tar)")
        if self.source == "table" and not self.table:
            raise ValueError("data.source is table: set data.table to a .csv, .tsv, .jsonl, .parquet file or a folder")
        if self.source in ("shards", "table") and self.trees not in (None, FLAT, SIDECARS):
            raise ValueError("data.trees is a corpus' file; the trees of shards lie in sidecars (data.sidecars)")
        if self.source == "scenes" and self.trees == FLAT:
            raise ValueError("data.trees: scenes come with their trees; alignment.parse_trees: false goes without")


@dataclass(frozen=True)
class RegionsSection:
    """Which regions of an image take part (§3.2)."""

    # random: boxes; partition: boxes that cover the image once; segments: stored masks, topped up with random boxes
    kind: Literal["random", "partition", "segments"] = "random"
    count: PositiveInt = 10  # M, the regions of each image
    largest: PositiveShare = 1.0  # longest side of a box, as a share of the image's

    def __post_init__(self) -> None:
        validate(self, "regions")
        if self.kind == "partition" and self.largest != 1:
            raise ValueError("regions.largest is for random boxes: those of a partition are as large as its cuts leave")

    @property
    def drawn(self) -> DrawnRegions:
        """How regions are drawn that are no masks."""
        return "partition" if self.kind == "partition" else "random"


@dataclass(frozen=True)
class OptimSection:
    """AdamW with linear warm-up and cosine decay; the numbers of the common CC12M recipe."""

    lr: Share = 1e-3  # peak learning rate; AdamW moves a weight by about this much in a step
    weight_decay: NonNegativeFloat = 0.2  # of matrices; gains, biases and scales do not decay
    beta1: Annotated[float, Range(ge=0, lt=1)] = 0.9  # decay of Adam's first moment
    beta2: Annotated[float, Range(ge=0, lt=1)] = 0.98  # decay of Adam's second moment
    eps: PositiveFloat = 1e-6  # added to Adam's denominator
    warmup: NonNegativeInt = 0  # steps of linear warm-up
    schedule: Literal["cosine", "constant"] = "cosine"  # the learning rate after the warm-up
    grad_clip: PositiveFloat | None = None  # largest norm of the gradient; null: no limit

    def __post_init__(self) -> None:
        validate(self, "optim")


@dataclass(frozen=True)
class TrainSection:
    """The length of the run, its hardware, and what it logs and keeps."""

    steps: PositiveInt = 1000  # updates of the run
    epochs: PositiveFloat | None = None  # instead of steps: passes over the data
    batch_size: Annotated[int, Range(ge=2)] = 128  # C, the pairs of a batch on all ranks; one has no negative
    seed: NonNegativeInt = 0  # decides the weights and the regions; the data have data.seed
    device: str = "auto"  # auto: a GPU when there is one
    # auto: bf16 on a GPU; fp8: bf16, with float8 products in the linear layers of the blocks, on a GPU that has them
    precision: Literal["auto", "float32", "bf16", "fp8"] = "auto"
    # the towers: as a whole, or each block by itself, which compiles in a quarter of the time; auto: whole, on a GPU,
    # and replayed as CUDA graphs where one process takes whole batches
    compile: Literal["auto", "always", "blocks", "never"] = "auto"
    accumulate: PositiveInt = 1  # parts in which a rank's share of a batch passes the towers; the loss sees all of it
    checkpoint_activations: bool = False  # compute the towers' activations again in the backward pass: less memory
    # FSDP: weights and optimiser sharded over all ranks, or over groups of ranks that hold one copy each
    sharding: Literal["none", "full", "hybrid"] = "none"
    shard_ranks: PositiveInt | None = None  # ranks of a group of sharding: hybrid; null: those of one machine
    mixed_precision_param: Literal["float32", "bf16"] = "float32"  # sharded weights as they are gathered and compute
    mixed_precision_reduce: Literal["float32", "bf16"] = "float32"  # gradients of sharded weights as they are summed
    # what stays as it is: image or text, a whole tower, or with :N its embeddings and first N blocks; image:8,text
    freeze: str | None = None
    # compute once what the frozen blocks of the image tower make of each image of a corpus, and keep it: a step costs
    # what is trained. Images are shown whole (data.crop: 1)
    precompute: bool = False
    layer_decay: PositiveShare = 1.0  # factor of the learning rate from a layer to the one below; heads have it full
    lora: NonNegativeInt = 0  # rank of the adapters that blocks are trained by instead of their weights (LoRA); 0: none
    lora_scale: PositiveFloat = 2.0  # what the adapters' products are multiplied with: LoRA's α over the rank
    log_every: PositiveInt = 10  # steps between two rows of metrics.jsonl
    checkpoint_every: NonNegativeInt = 100  # steps between checkpoints; 0: none by their count
    checkpoint_minutes: PositiveFloat | None = None  # a checkpoint is also written when the last one is this old
    # whole: one file, gathered on one rank, written in the background; sharded: a folder, each rank writes its part
    checkpoint_format: Literal["whole", "sharded"] = "whole"
    keep: PositiveInt = 2  # checkpoints that are kept, the newest
    max_skipped: NonNegativeInt = 10  # updates in a row that may be left out because something is not finite
    evaluate_every: NonNegativeInt = 0  # steps between evaluations; 0: only at the end
    save_model: bool = True  # false: the run keeps its results and no model
    wandb: str | None = None  # a Weights & Biases project that metrics go to as well

    def __post_init__(self) -> None:
        validate(self, "train")
        parse_freeze(self.freeze)
        if self.precompute and "image" not in parse_freeze(self.freeze):
            raise ValueError(
                "train.precompute keeps what frozen blocks of the image tower give: set train.freeze: image:N"
            )
        if self.precompute and (self.checkpoint_activations or self.sharding != "none" or self.lora):
            raise ValueError(
                "train.precompute does not go with train.checkpoint_activations, train.sharding or train.lora"
            )
        if self.lora and self.layer_decay < 1:
            raise ValueError(
                "train.layer_decay is for weights that are trained, and train.lora trains none of the blocks'"
            )
        if self.lora and self.precision == "fp8":
            raise ValueError("train.precision: fp8 does not go with train.lora, whose weights do not train; take bf16")
        if self.lora and self.sharding != "none":
            raise ValueError(
                f"train.lora does not go with train.sharding: {self.sharding}; adapters leave little to shard"
            )
        unsharded = [
            f"train.{name}"
            for name in ("mixed_precision_param", "mixed_precision_reduce")
            if self.sharding == "none" and getattr(self, name) != "float32"
        ]
        if unsharded:
            raise ValueError(f"{unsharded[0]} is for sharded weights: set train.sharding to full or hybrid as well")
        if self.shard_ranks is not None and self.sharding != "hybrid":
            raise ValueError("train.shard_ranks is the size of a group of train.sharding: hybrid, which is not set")


@dataclass(frozen=True)
class EvaluationSection:
    """What is measured when the run ends, and every `train.evaluate_every` steps; by global embeddings, zero-shot."""

    retrieval: str | None = None  # held-out data: shards, written as data.shards are, or a table
    classification: str | None = None  # zero-shot: a folder of classes, or a tar or a folder of tars with labels
    composition: str | None = None  # a folder of SugarCrepe's files with the images in images/
    scenes: NonNegativeInt = 0  # embedded test scenes; 0: none, true: 500

    def __post_init__(self) -> None:
        validate(self, "evaluation")


def parse_redraw(text: str | None) -> list[str]:
    """`text,heads` → the parts that are drawn anew. ValueError when it names something else."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if (text is not None and not parts) or set(parts) - set(REDRAWN):
        raise ValueError(f"model.redraw must name parts, such as text, heads or image,text, not {text!r}")
    return parts


def parse_freeze(text: str | None) -> dict[str, int | None]:
    """`image:8,text` → how many blocks of which tower are frozen; None: all of it. ValueError when it says nothing."""
    frozen: dict[str, int | None] = {}
    for part in text.split(",") if text else ():
        tower, colon, depth = part.strip().partition(":")
        if tower not in TOWERS or (colon and not depth.isdecimal()) or tower in frozen:
            raise ValueError(
                f"train.freeze must name towers and depths, such as image, text or image:8,text, not {text!r}"
            )
        frozen[tower] = int(depth) if colon else None
    return frozen
