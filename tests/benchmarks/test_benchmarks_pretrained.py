"""The benchmark of pretrained towers: starts are read, locked towers looked up, rates chosen, finished runs kept."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pretrained
import pytest
import torch

from powerclip.encoders import build, load, save, tokenizer_for
from powerclip.errors import UserError
from tests.mini_corpus import write_mini_corpus

TOWERS = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "head_width": 8, "layers": 12},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
}


def run_of(method: str, rate: float, seed: int, recall: float) -> pretrained.Run:
    return pretrained.Run("both", method, rate, seed, recall, recall / 2, 1.0, 1.0)


def test_a_start_says_what_is_locked_and_what_is_drawn_anew():
    both = pretrained.parse_start("both=starts/both")
    assert (both.tuned, both.text_locked, both.redraw) == (False, False, "heads")
    assert "train.freeze='image:12'" in both.overrides()
    scratch = pretrained.parse_start("new=starts/both:tuned:redraw=image,text")
    assert scratch.tuned
    assert "model.redraw='image,text'" in scratch.overrides()
    assert "train.freeze=null" in scratch.overrides()
    assert "train.freeze='image:12,text:6'" in pretrained.parse_start("locked=a:text").overrides()
    with pytest.raises(UserError, match="'frozen' in 'a=b:frozen'"):
        pretrained.parse_start("a=b:frozen")
    with pytest.raises(UserError, match="not NAME=FOLDER"):
        pretrained.parse_start("both")


def test_each_method_stands_at_the_rate_that_was_best_with_seed_0():
    clip = [run_of("clip", 1e-3, 0, 3.0), run_of("clip", 3e-4, 0, 5.0), *(run_of("clip", 3e-4, s, 5.0) for s in (1, 2))]
    ours = [run_of("powerclip", 1e-3, s, 7.0 + s / 10) for s in (2, 0, 1)] + [run_of("powerclip", 3e-4, 0, 6.9)]
    assert [one.seed for one in pretrained.at_best(ours)] == [0, 1, 2]
    lines = pretrained.table([*clip, *ours]).splitlines()
    assert lines[-2].startswith("| both | clip | 0.0003 | 5.0 ± 0.0 | – |")
    assert lines[-1].startswith("| both | powerclip | 0.001 | 7.1 ± 0.1 | 0.0")


def test_a_run_with_a_locked_tower_is_kept_and_not_done_again(tmp_path, monkeypatch, capsys):
    folder = write_mini_corpus(tmp_path / "captions10k")
    (folder / "trees.tsv.gz").write_bytes(gzip.compress((folder / "trees.tsv").read_bytes()))
    monkeypatch.setitem(os.environ, "POWERCLIP_DATA", str(tmp_path))
    torch.manual_seed(0)
    tower = build(config=TOWERS)
    save(tower, tmp_path / "start", tokenizer_for(tower))
    out = tmp_path / "out"
    command = f"pretrained.py both={tmp_path}/start --steps 2 --batch 4 --seeds 2 --rates 1e-3,1e-2 -o {out}"
    monkeypatch.setattr("sys.argv", command.split())
    pretrained.main()
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    assert [(one["method"], one["seed"]) for one in runs] == [(m, s) for m in ("clip", "powerclip") for s in (0, 0, 1)]
    assert all(0 < one["mean_recall"] <= 100 for one in runs)
    model = load(out / "both" / "clip 0.001" / "seed-0" / "model")[0].clip.visual.transformer.state_dict()
    assert all(torch.equal(value, tower.clip.visual.transformer.state_dict()[name]) for name, value in model.items())

    def never(*args: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(pretrained, "train", never)
    pretrained.main()
    assert len((out / "runs.jsonl").read_text().splitlines()) == 6
    assert "| both | powerclip |" in next(Path(out).glob("*pretrained-cpu.md")).read_text()
    capsys.readouterr()


def test_tokens_that_were_looked_up_give_the_features_of_the_whole_tower():
    torch.manual_seed(0)
    encoder = build(config=TOWERS).eval()
    images = torch.randn(3, 3, 16, 16)
    found = pretrained.head(encoder, pretrained.image_tokens(encoder, images), dense=True)
    with torch.no_grad():
        whole = encoder.image_features(images, dense=True)
    torch.testing.assert_close(found.image, whole.image, atol=0.03, rtol=0.03)  # tokens are kept in bf16
    torch.testing.assert_close(found.patches, whole.patches, atol=0.05, rtol=0.05)
