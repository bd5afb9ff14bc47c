"""From the parts of one GPU's step to the tables of docs/scaling.md, and the soak's own bookkeeping."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import scaling
import soak
import step_parts

ROOT = Path(__file__).parents[2]
PARTS = {"copy": 1.0, "towers": 50.0, "loss": 4.0, "backward": 100.0, "norm": 1.0, "optimiser": 2.0, "step": 160.0}


def measurement() -> dict:
    origin = {"machine": "a GPU"}
    return {
        "origin": origin,
        "model": "ViT-B-16",
        "batch": {"pairs": 512},
        "parts": {"clip": PARTS, "powerclip": PARTS},
    }


STEPS = {
    "batch": {"pairs": "512 × 4096"},
    "rows": [{"name": "our CLIP", "ms": 1.0}, {"name": scaling.GATHERED, "ms": 174.0}],
}


def test_a_share_of_the_batch_costs_its_share_of_the_towers_its_rows_of_pairs_and_all_of_adamw():
    one = scaling.read(measurement(), STEPS)
    assert one.compute(1, 512) == pytest.approx(0.160)  # as measured, both
    assert one.compute(8, 4096) == pytest.approx(0.174)
    fixed, loss = 0.003, 0.002  # 14 ms are seven times 512 captions
    towers = 0.160 - fixed - loss
    assert one.compute(64, 4096) == pytest.approx(fixed + towers / 8 + loss)
    assert one.compute(64, 32768) == pytest.approx(fixed + towers + 64 * loss)


def test_without_a_measurement_only_messages_are_shown():
    bare, full = scaling.tables(), scaling.tables(measurement(), STEPS)
    assert "efficiency" not in bare
    assert "a GPU" in full
    assert full.count("| 512 |") >= bare.count("| 512 |") > 0
    for table in (bare, full):
        rows = [line for line in table.splitlines() if line.startswith("| 64 ")]
        assert len(rows) == 2
        assert "| 1,124 |" in rows[0]  # MiB of gradients: 2 · 63/64 · 4 bytes of 149.6 million


def test_the_page_has_a_place_for_the_tables():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert page.index(scaling.BEGIN) < page.index("| GPUs |") < page.index(scaling.END)


def test_every_part_of_a_step_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["step_parts.py", "--tiny", "--output", str(tmp_path)])
    step_parts.main()
    assert "| powerclip |" in next(tmp_path.glob("*-step-parts-tiny.md")).read_text()


def test_the_soak_refuses_a_replay_that_differs_and_reads_past_a_torn_line(tmp_path):
    path = tmp_path / "run.keys"
    path.write_text("\n0 a b\n1 c d\n2 e\n\n1 c d\n2 e f\n")
    assert soak.read_keys(path) == ({0: ("a", "b"), 1: ("c", "d"), 2: ("e", "f")}, 1)
    path.write_text("\n0 a b\n\n0 a c\n")
    with pytest.raises(SystemExit, match="step 0 was replayed as it was"):
        soak.read_keys(path)


def test_the_soak_damages_a_few_samples_and_knows_which(tmp_path):
    from powerclip.data.shards import open_shards

    bad = soak.write_shards(tmp_path / "shards", 400)
    assert 4 <= len(bad) <= 24
    found = open_shards(sorted((tmp_path / "shards").glob("*.tar")))
    assert 380 < found.samples < 400
    assert sum(map(len, found.damage.values())) == 1
