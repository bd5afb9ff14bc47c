"""The README's walk: images and a CSV, fine-tuned from a folder of weights, measured, looked at, in four commands."""

from __future__ import annotations

import csv
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_pil_image

from powerclip import cli
from powerclip.data.scenes import render, scene_batch
from powerclip.encoders import build, load, save
from powerclip.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TOWERS = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
    "text_cfg": {"context_length": 40, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}


def commands() -> list[str]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Fine-tune on your own images", 1)[1]
    block = re.search(r"^```bash\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert block
    return block[1].strip().splitlines()


def write_table(path: Path, images: Path, numbers: range) -> None:
    """Drawn scenes as files, and a table of their paths, captions and a column that is neither."""
    images.mkdir(exist_ok=True)
    scenes = scene_batch(numbers, seed=0)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["filepath", "caption", "licence"])
        for number, scene, pixels in zip(numbers, scenes, render(scenes, size=32), strict=True):
            image = images / f"{number:04}.jpg"
            to_pil_image(pixels).save(image)
            rows.writerow([f"{images.name}/{image.name}", scene.caption, "public domain"])


def test_the_readmes_walk_from_a_csv_to_heatmaps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save(build(config=TOWERS), tmp_path / "start")
    write_table(tmp_path / "photos.csv", tmp_path / "photos", range(256))
    write_table(tmp_path / "held-out.csv", tmp_path / "held-out", range(256, 288))

    for command in commands():
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code, (command, capsys.readouterr())
        if "--dry-run" in command:
            told = capsys.readouterr().out
            assert "MISSING" not in told
            assert "trees: sidecars where there are some, the embedded parser for the rest" in told
            assert not (tmp_path / "runs").exists()
    assert "mean_recall" in capsys.readouterr().out.replace(" ", "_")

    rows = list(read_metrics(tmp_path / "runs" / "photos" / "metrics.jsonl"))
    assert rows[-1]["step"] == 20  # ten epochs of two batches of 128
    assert rows[-1]["batch/nodes"] > 2  # parsed, not one flat phrase a caption
    before, after = (load(tmp_path / name)[0].clip.state_dict() for name in ("start", "runs/photos"))
    assert not torch.equal(before["visual.proj"], after["visual.proj"])
    with Image.open(tmp_path / "heatmaps.png") as heatmaps:
        assert min(heatmaps.size) > 100
