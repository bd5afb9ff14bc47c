"""The order of a stream: every sample once an epoch, few shards at a time, the same from wherever one begins."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from powerclip.data.shard_order import StreamOrder

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any)


def epoch(order: StreamOrder, number: int) -> list[tuple[int, int]]:
    samples = [order.sample_at(position) for position in range(number * order.samples, (number + 1) * order.samples)]
    assert {sample.epoch for sample in samples} == {number}
    return [(sample.shard, sample.number) for sample in samples]


@given(COUNTS, st.integers(1, 4), st.integers(0, 5))
def test_every_sample_is_shown_once_an_epoch(counts, window, number):
    everything = [(shard, sample) for shard, count in enumerate(counts) for sample in range(count)]
    assert sorted(epoch(StreamOrder(counts, 3, window), number)) == everything


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch(StreamOrder([20, 30, 25], seed), number) for seed in range(2) for number in range(3)]
    assert len({tuple(order) for order in orders}) == 6


def test_only_the_shards_of_one_window_are_read_at_a_time():
    order = StreamOrder([10] * 12, seed=1, window=3)
    shown = epoch(order, 0)
    windows = [{shard for shard, _ in shown[start : start + 30]} for start in range(0, 120, 30)]
    assert all(len(window) == 3 for window in windows)
    assert set().union(*windows) == set(range(12))
    # Mixed, not one after the other.
    assert len({shard for shard, _ in shown[:10]}) > 1


def test_which_shards_share_a_window_changes_from_epoch_to_epoch():
    order = StreamOrder([10] * 12, seed=1, window=3)
    first = [{shard for shard, _ in epoch(order, number)[:30]} for number in range(4)]
    assert len({frozenset(window) for window in first}) > 1


def test_a_place_does_not_depend_on_what_was_asked_before_nor_on_the_process():
    order = StreamOrder([7, 3, 9, 4], seed=5, window=2)
    positions = [60, 2, 41, 22, 0, 59]
    fresh = [StreamOrder([7, 3, 9, 4], seed=5, window=2).sample_at(position) for position in positions]
    assert [order.sample_at(position) for position in positions] == fresh
    assert [pickle.loads(pickle.dumps(order)).sample_at(position) for position in positions] == fresh


@given(COUNTS.filter(lambda counts: sum(counts) > 4), st.integers(0, 40), st.integers(1, 4))
def test_a_stand_in_comes_from_the_window_but_never_from_the_batch(counts, step, window):
    order = StreamOrder(counts, 2, window)
    batch = range(4 * step, 4 * step + 4)
    for position in batch:
        shard_window = order._window_at(*divmod(position, order.samples))
        members = {shard_window.sample_at(position // order.samples, at) for at in range(len(shard_window))}
        shown = {order.sample_at(other) for other in batch}
        spares = {order.substitute(position, attempt, batch) for attempt in range(1, 6)}
        assert spares <= members
        if len(members - shown) > 0:
            assert not spares & shown


def test_stand_ins_of_a_position_differ_from_attempt_to_attempt():
    order = StreamOrder([1000], seed=0)
    spares = [order.substitute(5, attempt, range(4, 8)) for attempt in range(1, 20)]
    assert len(set(spares)) > 15
    assert spares == [order.substitute(5, attempt, range(4, 8)) for attempt in range(1, 20)]


def test_a_shard_without_samples_is_never_asked_for():
    assert {shard for window in (1, 2, 9) for shard, _ in epoch(StreamOrder([5, 0, 6], 0, window), 0)} == {0, 2}
