"""Messages on paper: the formulas of the module, and what they say about scaling."""

from __future__ import annotations

import pytest

from powerclip.train.communication import FAST, SLOW, parallel_efficiency, seconds, traffic


def test_one_rank_sends_nothing_and_many_send_twice_what_they_share():
    assert traffic(1, 4096, 512, 1000).total == 0
    many = traffic(1_000_000, 4096, 512, 1000, nodes=12)
    assert many.gradients == pytest.approx(2 * 4 * 1000, rel=1e-5)
    assert many.embeddings == pytest.approx(2 * 4 * 2 * 4096 * 512, rel=1e-5)
    assert many.phrases == pytest.approx(2 * 4 * 4096 * 12 * 512, rel=1e-5)
    assert many.exposed == pytest.approx(many.total - many.gradients)


def test_a_loss_of_global_embeddings_sends_no_phrases():
    assert traffic(8, 4096, 512, 1000).phrases == traffic(8, 4096, 512, 1000).columns == 0


def test_time_is_set_by_the_slowest_link_and_the_number_of_hops():
    assert seconds(450e9, 2, FAST) == pytest.approx(1.0, rel=1e-4)
    assert seconds(400e9, 16, FAST) == pytest.approx(1.0, rel=1e-3)
    assert seconds(0, 512, FAST) == pytest.approx(2 * (512 - 64) * 5e-6 + 2 * 63 * 15e-6)
    assert seconds(1e9, 16, SLOW) > 25 * seconds(1e9, 16, FAST)
    assert seconds(1e9, 8, SLOW) == seconds(1e9, 8, FAST)


def test_efficiency_falls_with_the_ranks_and_rises_with_the_work_of_each():
    def of(ranks: int, compute: float) -> float:
        return parallel_efficiency(compute, traffic(ranks, 4096, 512, 150_000_000, 12), ranks, FAST)

    assert of(1, 0.1) == 1.0
    assert of(8, 0.1) > of(64, 0.1) > of(512, 0.1)
    assert of(64, 1.0) > of(64, 0.1)
