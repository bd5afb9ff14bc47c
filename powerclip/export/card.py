"""A model card from what is known: the run's data, recipe and scores, the parity of exports, how to load it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from powerclip import __version__
from powerclip.encoders import DualEncoder
from powerclip.errors import UserError
from powerclip.export.check import Parity
from powerclip.report.table import Cell, Column, Row, Table, fixed
from powerclip.train.recipe import Recipe, dump
from powerclip.train.results import read_results
from powerclip.train.run_folder import RunFolder

HEAD = {
    "license": "other",
    "license_name": "fill-in",
    "library_name": "open_clip",
    "pipeline_tag": "zero-shot-image-classification",
    "tags": ["clip", "open_clip", "powerclip"],
}
# What a table of scores begins with, where a run has measured it.
_FIRST = ("mean_recall", "acc1", "mean_kind_acc", "pointing_words")


@dataclass(frozen=True)
class Score:
    """A score of the run, in percent, and the spread over seeds where a study has several."""

    value: float
    std: float | None = None
    seeds: int = 1

    def __str__(self) -> str:
        return fixed(self.value) if self.std is None else f"{fixed(self.value)} ± {fixed(self.std)}"


@dataclass(frozen=True)
class RunFacts:
    """What a run's folder tells about its model."""

    recipe: Recipe
    scores: Mapping[str, float]  # `TASK/metric` → share, 0 to 1: of this model
    study: Mapping[str, Score]  # `TASK/metric` → mean over the seeds of the run's study; empty without one
    trained: str = ""  # when and on what


def describe_run(source: str | Path) -> RunFacts | None:
    """The run that the model `source` comes from: its folder, its `model/`, a checkpoint; None where there is none."""
    path = Path(str(source).removeprefix("local-dir:")).expanduser()
    for root in (path, path.parent, path.parent.parent) if path.exists() else ():
        folder = RunFolder(root.absolute())
        if folder.holds_run():
            try:
                results = read_results(folder.results).scores if folder.finished else {}
                return RunFacts(folder.read_recipe(), results, _study_scores(folder.root), _trained(folder))
            except UserError:  # a recipe or results of another version: the model is readable all the same
                return None
    return None


def _study_scores(run: Path) -> dict[str, Score]:
    """The summary of the study that a run lies in, as STUDY/SETTING/SEED or STUDY/SEED/SETTING."""
    try:
        content = json.loads((run.parent.parent / "results.json").read_text(encoding="utf-8"))
        settings = content["settings"]
        name = next(name for name in (run.name, run.parent.name) if name in settings)
        return {
            key: Score(value["mean"], value["std"], value["seeds"])
            for key, value in settings[name]["summary"].items()
            if isinstance(value, dict) and value.get("mean") is not None
        }
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return {}


def _trained(folder: RunFolder) -> str:
    try:
        last = json.loads(folder.environment.read_text(encoding="utf-8"))[-1]
        where = ", ".join(last["gpus"]) or f"{last['cpus']} CPU cores"
        return f"{last['time'][:10]}, {where}, torch {last['packages'].get('torch', '?')}"
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""


def model_card(
    name: str,
    model: DualEncoder,
    run: RunFacts | None,
    parities: Sequence[Parity] = (),
    *,
    contents: Collection[str] = (),
    dense: bool = False,
) -> str:
    """The card as Markdown.

    Args:
        name: `org/name` on the hub, or a folder's.
        model: what it describes.
        run: the run that trained it, where it is known.
        parities: what was measured of its exports.
        contents: the forms of the model in the folder: `open_clip`, `hf`, `onnx`, `pt2`.
        dense: whether the graphs and programs give patches and words.
    """
    sections = [
        f"---\n{yaml.safe_dump(HEAD, sort_keys=False)}---",
        f"# {name}",
        _about(model, run),
        "## To fill in before you publish\n\n"
        "- **Licence** of the weights (`license` at the top), and what the licence of the training data allows:\n"
        "- **Intended use**, and uses that are out of scope:\n"
        "- **Known limits and biases** of the training data:",
        *_training(run),
        *_scores(run),
        *_parity(parities),
        _loading(name, contents, dense=dense),
    ]
    return "\n\n".join(sections) + "\n"


def _about(model: DualEncoder, run: RunFacts | None) -> str:
    vision, text = model.config["vision_cfg"], model.config["text_cfg"]
    (rows, columns), (height, width) = model.grid, model.image_size
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    method = f" It was trained by the objective `{run.recipe.objective}`." if run is not None else ""
    return (
        f"A CLIP model of {millions:,.1f} million parameters, made with PowerCLIP {__version__}.{method} Images of "
        f"{height}×{width} pixels become {rows}×{columns} patches ({_layers(vision)}), captions of up to "
        f"{model.context_length} tokens are read by {_layers(text)}; embeddings have {model.embed_dim} numbers. "
        "Patches and words lie in the same space as the global embeddings: a phrase has a heatmap over the image."
    )


def _layers(tower: Mapping[str, Any]) -> str:
    name = tower.get("timm_model_name") or tower.get("hf_model_name")
    return str(name) if name else f"{tower.get('layers', 12)} layers of width {tower.get('width', 768)}"


def _training(run: RunFacts | None) -> list[str]:
    if run is None:
        return ["## Training\n\nNothing is known here about how this model was trained: say it."]
    recipe = run.recipe
    data, train = recipe.data, recipe.train
    what = "scenes that powerclip draws itself" if data.source == "scenes" else _without_folders(str(data.shards))
    steps = train.steps or 0
    facts = [
        ("data", f"`{data.source}`: {what}"),
        ("objective", recipe.objective),
        ("regions", f"{recipe.regions.count}, {recipe.regions.kind}"),
        ("steps × batch", f"{steps:,} × {train.batch_size:,} = {steps * train.batch_size:,} pairs"),
        ("learning rate, weight decay", f"{recipe.optim.lr:g}, {recipe.optim.weight_decay:g}"),
        ("started from", _without_folders(recipe.model.pretrained) if recipe.model.pretrained else "random weights"),
        *([("trained", run.trained)] if run.trained else []),
    ]
    table = Table.plain(["", "value"], facts).markdown()
    whole = "\n".join(_without_folders(line) for line in dump(recipe).splitlines())
    return [
        f"## Training\n\n{table}\n\n<details><summary>The whole recipe</summary>\n\n```yaml\n{whole}\n```\n\n</details>"
    ]


def _without_folders(text: str) -> str:
    """Text whose absolute paths have lost the folders of the machine that the model was trained on."""
    words = [
        f"…/{Path(word).name}" if word.startswith(("/", "~")) and len(word) > 1 else word for word in text.split(" ")
    ]
    return " ".join(words)


def _scores(run: RunFacts | None) -> list[str]:
    if run is None or not (run.scores or run.study):
        return ["## Scores\n\nNone were measured: `powerclip evaluate` gives some."]
    keys = sorted(run.scores or run.study, key=lambda key: (key.split("/")[-1] not in _FIRST, key))
    seeds = max((score.seeds for score in run.study.values()), default=1)
    several = seeds > 1
    rows = []
    for key in keys:
        own = Cell(fixed(100 * run.scores[key]) if key in run.scores else "–")
        rows.append(Row(key, [own, Cell(str(run.study[key]) if key in run.study else "–")] if several else [own]))
    spread = [Column(f"mean ± sd of {seeds} seeds")] if several else []
    note = "" if several else "\n\nOf one run: how far another seed would be off is not known."
    table = Table([Column("this model"), *spread], rows, corner="score (%)").markdown()
    return [f"## Scores\n\n{table}{note}"]


def _parity(parities: Sequence[Parity]) -> list[str]:
    if not parities:
        return ["## Parity\n\nNot measured: `powerclip export … --check` does."]
    rows = [
        (
            f"{parity.format} {parity.precision}",
            ", ".join(f"{name} {value:.0e}" for name, value in parity.differences.items()),
            fixed(100 * parity.recall, 2),
            fixed(100 * parity.reference_recall, 2),
            "–" if parity.processor is None else f"{parity.processor:.0e}",
        )
        for parity in parities
    ]
    heads = ["export", "largest difference from the model", "mean recall (%)", "the model's (%)", "processor"]
    return [
        f"## Parity\n\nOn {parities[0].data}, each output beside that of the model in float32. *Mean recall* is of "
        "R@1, R@5 and R@10 both ways. *Processor*: the largest difference of `image_embeds` when transformers' image "
        f"processor prepares the images, which resizes a little differently.\n\n{Table.plain(heads, rows).markdown()}"
    ]


def _loading(name: str, contents: Collection[str], *, dense: bool) -> str:
    hub = "/" in name
    blocks = []
    if "open_clip" in contents:
        location = f"hf-hub:{name}" if hub else f"local-dir:{name}"
        blocks.append(
            "**powerclip**\n\n```python\nimport powerclip\n\n"
            f'model, preprocess, tokenizer = powerclip.load("{location}")\n'
            "embeddings, patches = model.encode_patches(preprocess(image)[None])\n```"
        )
        blocks.append(
            "**open_clip**\n\n```python\nimport open_clip\n\n"
            f'model, preprocess = open_clip.create_model_from_pretrained("{location}")\n'
            f'tokenizer = open_clip.get_tokenizer("{location}")\n```'
        )
    if "hf" in contents:
        blocks.append(
            "**transformers**\n\n```python\nfrom transformers import CLIPModel, CLIPProcessor\n\n"
            f'model, processor = CLIPModel.from_pretrained("{name}"), CLIPProcessor.from_pretrained("{name}")\n'
            'inputs = processor(text=["a dog"], images=image, return_tensors="pt", padding=True)\n'
            "probabilities = model(**inputs).logits_per_image.softmax(dim=-1)\n```"
        )
        if "open_clip" not in contents:
            blocks.append(
                "**powerclip** reads the same folder, and the result saves as an open_clip model:\n\n```python\nimport "
                f'powerclip\n\nmodel, preprocess, tokenizer = powerclip.load("{name}")\n```'
            )
    if "onnx" in contents:
        blocks.append(_onnx_block(name, hub=hub, dense=dense))
    if "pt2" in contents:
        blocks.append(
            "**torch alone**\n\n```python\nimport torch\n\n"
            f'vision = torch.export.load("{name}/vision_model.pt2").module()\n'
            f"{_outputs(dense)} = vision(pixel_values)  # text_model.pt2 takes input_ids\n```"
        )
    return "## How to load it\n\n" + "\n\n".join(blocks)


def _outputs(dense: bool) -> str:
    return "image_embeds, patch_embeds" if dense else "(image_embeds,)"


def _onnx_block(name: str, *, hub: bool, dense: bool) -> str:
    path = f'hf_hub_download("{name}", "onnx/vision_model.onnx")' if hub else f'"{name}/onnx/vision_model.onnx"'
    download = "from huggingface_hub import hf_hub_download\n" if hub else ""
    return (
        "**onnxruntime** (tokenizer and image processor by transformers; transformers.js reads the same layout)\n\n"
        f"```python\n{download}import onnxruntime\nfrom transformers import AutoTokenizer, CLIPImageProcessor\n\n"
        f'processor = CLIPImageProcessor.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        f"vision = onnxruntime.InferenceSession({path})\n"
        'pixels = processor(images=image, return_tensors="np")["pixel_values"]\n'
        f'{_outputs(dense)} = vision.run(None, {{"pixel_values": pixels}})\n'
        '# text_model.onnx: input_ids of tokenizer(captions, padding=True, truncation=True, return_tensors="np")\n```'
    )
