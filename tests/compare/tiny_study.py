"""A recipe on the mini corpus that runs in a second and a study of it, shared by the tests of studies."""

from __future__ import annotations

from pathlib import Path

BASE = """
model:
  config:
    embed_dim: 16
    vision_cfg: {{image_size: 16, patch_size: 8, width: 16, layers: 1, head_width: 8}}
    text_cfg: {{context_length: 40, vocab_size: 49408, width: 8, heads: 1, layers: 1}}
data: {{source: corpus, shards: {corpus}/train-*.tar, trees: {corpus}/trees.tsv, workers: 0}}
regions: {{count: 3}}
train: {{steps: {steps}, batch_size: 4, device: cpu, log_every: 1}}
evaluation: {{composition: {corpus}/sugarcrepe{more}}}
"""
STUDY = """
about: A trial.
base: base.yaml
baseline: clip
settings:
  powerclip:
  clip: {about: the baseline, objective: clip}
  heavy: {alignment: {weight: 3.0}}
"""


def write_base(folder: Path, corpus: Path, steps: int = 2, *, retrieval: bool = False) -> None:
    """`base.yaml` in a folder: trains on the corpus, measures composition and, if so asked, retrieval."""
    more = f", retrieval: {corpus}/val-000.tar" if retrieval else ""
    (folder / "base.yaml").write_text(BASE.format(corpus=corpus, steps=steps, more=more))
