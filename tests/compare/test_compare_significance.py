"""The paired t-test: the tables' critical values, and sense at its edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerclip.compare.significance import paired_error, paired_p, two_sided_p

# Two-sided critical values as every statistics textbook prints them: (degrees of freedom, p, t).
TABLE = [
    (1, 0.05, 12.706), (2, 0.05, 4.303), (3, 0.05, 3.182), (4, 0.05, 2.776), (9, 0.05, 2.262), (30, 0.05, 2.042),
    (1, 0.01, 63.657), (2, 0.01, 9.925), (4, 0.01, 4.604), (9, 0.01, 3.250), (60, 0.01, 2.660), (4, 0.001, 8.610),
]  # fmt: skip


@pytest.mark.parametrize(("freedom", "p", "t"), TABLE)
def test_critical_values_are_those_of_the_tables(freedom, p, t):
    assert two_sided_p(t, freedom) == pytest.approx(p, rel=2e-3)
    assert two_sided_p(-t, freedom) == two_sided_p(t, freedom)


@pytest.mark.parametrize("freedom", range(1, 9))
@pytest.mark.parametrize("t", [0.0, 0.3, 1.7, 6.0])
def test_it_is_the_integral_of_the_density(freedom, t):
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    steps = 4000
    middle = [(step + 0.5) * t / steps for step in range(steps)]
    within = sum((1 + x * x / freedom) ** (-(freedom + 1) / 2) for x in middle) * t / steps * constant
    assert two_sided_p(t, freedom) == pytest.approx(1 - 2 * within, abs=1e-6)


@given(t=st.floats(0, 1e6), more=st.floats(0.01, 10), freedom=st.integers(1, 200))
def test_a_larger_difference_is_never_less_significant(t, more, freedom):
    assert 0 <= two_sided_p(t + more, freedom) <= two_sided_p(t, freedom) + 1e-12 <= 1 + 1e-12


def test_a_worked_example():
    # Differences 1, 2, 3, 2, 2: mean 2, standard deviation 0.7071, t = 6.3246 with 4 degrees of freedom.
    assert paired_p([3, 4, 6, 6, 7], [2, 2, 3, 4, 5]) == pytest.approx(0.003197, abs=1e-5)
    assert paired_error([3, 4, 6, 6, 7], [2, 2, 3, 4, 5]) == pytest.approx(0.7071 / math.sqrt(5), abs=1e-4)


def test_pairs_that_say_nothing_about_spread():
    assert paired_p([1.0], [0.0]) is None
    assert paired_p([], []) is None
    assert paired_error([1.0], [0.0]) is None
    assert paired_p([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert paired_p([2.0, 3.0], [1.0, 2.0]) == 0.0
    with pytest.raises(ValueError, match="argument"):
        paired_p([1.0, 2.0], [1.0])
