"""Random numbers by key: no state, no library that may change them, and no pattern that shows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from powerclip.data.keyed_random import key_of, keys_of, permutation, uniform, uniforms


def test_numbers_are_those_that_a_run_of_last_year_saw():
    # Splitmix64 of state 0, as its authors' C code prints it: 16294208416658607535, 7960286522194355700, …
    assert [uniform(0, i) * 2**53 for i in range(2)] == [16294208416658607535 >> 11, 7960286522194355700 >> 11]
    # Pinned: a resumed run must not depend on the version that began it.
    assert key_of(1, 2, 3) == 74078413316773926
    assert permutation(key_of(7), 8).tolist() == [5, 4, 7, 6, 0, 1, 2, 3]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4), st.integers(1, 20))
def test_arrays_hold_the_numbers_that_single_draws_give(parts, count):
    key = key_of(*parts)
    assert uniforms(np.array([key], np.uint64), count)[0].tolist() == [uniform(key, i) for i in range(count)]


@given(st.integers(-1, 2**70), st.lists(st.integers(0, 2**62), min_size=1, max_size=5), st.integers(0, 9))
def test_arrays_of_keys_are_those_of_their_parts(seed, numbers, purpose):
    expected = [key_of(seed, number, purpose) for number in numbers]
    assert keys_of(seed, np.array(numbers), purpose).tolist() == expected


def test_every_part_of_a_key_counts_and_so_does_its_place():
    keys = [key_of(*parts) for parts in [(1,), (2,), (1, 0), (0, 1), (1, 1), (1, 0, 0), ()]]
    assert len(set(keys)) == len(keys)


def test_keys_that_follow_each_other_have_nothing_in_common():
    draws = uniforms(np.array([key_of(0, 0, number) for number in range(4000)], np.uint64), 3)
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(draws.std() - 12**-0.5) < 0.01
    neighbours = np.corrcoef(np.concatenate([draws[:-1].T, draws[1:].T]))
    assert np.abs(neighbours - np.eye(6)).max() < 0.07


@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_a_permutation_has_every_number_once(key, count):
    assert sorted(permutation(key, count).tolist()) == list(range(count))
