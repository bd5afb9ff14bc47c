"""The form of the loss for several ranks. With real processes it is tested in tests/train; here it has one rank.

Only the kernels meet several ranks here: Triton decides at its import whether it interprets.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from alignment_examples import random_parts
from test_alignment_loss import CONFIGS, with_gradient

from powerclip.alignment import AlignmentConfig, Parts, alignment_loss
from powerclip.alignment import spread as spread_module
from powerclip.alignment.contrast import hardest
from powerclip.alignment.score import score_all
from powerclip.alignment.spread import find_hardest, gather_nodes, spread_contrast
from powerclip.runtime.distributed import SINGLE


@pytest.mark.parametrize("gradient", ["select", "autograd"])
@pytest.mark.parametrize("name", CONFIGS)
def test_for_one_rank_it_is_the_loss_of_one_process(name, gradient):
    config = with_gradient(CONFIGS[name], gradient)
    results = []
    for spread in (True, False):
        parts = random_parts(8, 5, 16, seed=0, dtype=torch.float32)
        if spread:
            loss, positive, worst = spread_contrast(parts, config, config.scale, SINGLE)
        else:
            whole = alignment_loss(parts, config)
            loss, positive, worst = whole.loss, whole.positive, whole.negative
        results.append([loss, positive.mean(), worst.mean(), *torch.autograd.grad(loss, [parts.regions, parts.nodes])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("block", [1, 16, 1000])
def test_the_hardest_are_found_in_blocks_of_any_size(monkeypatch, k, block):
    monkeypatch.setattr(spread_module, "BLOCK_ELEMENTS", block)
    parts, config = random_parts(7, 4, 8, seed=2), AlignmentConfig()
    captions, images = find_hardest(parts, config, k, SINGLE)
    scores = score_all(parts.regions, parts.nodes, parts.segments, config).detach()
    assert torch.equal(captions, hardest(scores, k))
    assert torch.equal(images, hardest(scores.T, k))


def test_nodes_that_are_gathered_from_one_rank_are_its_own():
    parts: Parts = random_parts(5, 3, 8, seed=1)
    nodes, segments = gather_nodes(parts, SINGLE)
    assert torch.equal(nodes, parts.nodes)
    assert torch.equal(segments.index, parts.segments.index)
    assert segments.longest == parts.segments.longest


# Two ranks of three pairs each against one process with all six. `chosen`: pairs are listed, also where the gradient
# of all would cost less; hubs are shared out; and a host that asks how many pairs are its own is an error.
ON_RANKS = """
import sys
import torch
from torch import distributed as dist
from alignment_examples import random_parts
from powerclip.alignment import AlignmentConfig, Parts, alignment_loss, score, spread
from powerclip.alignment.kernels import pairs
from powerclip.alignment.ragged import Segments
from powerclip.runtime.distributed import Ranks

def refuse(*_, **__):
    raise AssertionError("the host asks how many pairs are its own")

rank, meeting, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
if way != "all":
    score.PAIRS_AT_LEAST = score.SIMILARITIES_PER_PAIR = 0
    pairs.PIECE = 2
if way == "chosen":
    torch.Tensor.nonzero = refuse
if way == "chosen, compact":
    spread.MOST_LISTED = 0
pairs.SMALLEST = 4  # what lies beyond an instance, the interpreter computes too
for aggregation in ("nla", "exact"):
    for settings in ({"negatives": "hardest"}, {"negatives": "semi_hard"}, {"negatives": "k", "k": 3}):
        settings = {**settings, "aggregation": aggregation, "tau": 0.05}
        whole = random_parts(6, 3, 16, seed=1, dtype=torch.float32)
        loss = alignment_loss(whole, AlignmentConfig(**settings, backend="reference")).loss
        expected = [loss.detach(), *torch.autograd.grad(loss, [whole.regions, whole.nodes])]
        rows = slice(3 * rank, 3 * rank + 3)
        lengths = whole.segments.lengths
        nodes = slice(int(lengths[: rows.start].sum()), int(lengths[: rows.stop].sum()))
        regions, own = (v.detach().clone().requires_grad_() for v in (whole.regions[rows], whole.nodes[nodes]))
        ours = Parts(regions, own, Segments.from_lengths(lengths[rows]))
        loss = alignment_loss(ours, AlignmentConfig(**settings, backend="triton"), ranks=Ranks(rank, 2)).loss
        of_regions, of_nodes = torch.autograd.grad(loss, [regions, own])
        dist.all_reduce(loss := loss.detach())
        found = [loss / 2, of_regions / 2, of_nodes / 2]
        for one, other in zip(found, [expected[0], expected[1][rows], expected[2][nodes]], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text: f"{settings}: {text}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["chosen", "chosen, compact", "all"])
def test_kernels_on_two_ranks_give_the_loss_and_the_gradients_of_one_process(tmp_path, way):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ON_RANKS, str(rank), str(tmp_path / "meeting"), way],
            cwd=Path(__file__).parent,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    complaints = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], complaints
