"""Faults are said once, counted always, and end a run when there are too many."""

from __future__ import annotations

import pytest

from powerclip.data.faults import Fault, FaultReport, FaultWatch
from powerclip.errors import UserError


def report(*faults: Fault, bad: list[tuple[int, int, int]] | None = None) -> FaultReport:
    made = FaultReport(bad=bad or [])
    for fault in faults:
        made.add(fault, "a.tar, sample x", "looks odd")
    return made


def test_every_fault_says_what_is_done_about_it():
    assert {fault.remedy for fault in Fault if fault.is_bad} == {"another sample replaces it"}
    assert {fault.remedy for fault in Fault if not fault.is_bad} == {"converted", "taken as one phrase", "random boxes"}


def test_each_kind_is_said_once_with_its_first_place():
    said = []
    watch = FaultWatch([10], ["a.tar"], warn=said.append)
    watch.check(report(Fault.TRUNCATED, Fault.CMYK, Fault.CMYK))
    watch.check(report(Fault.CMYK))
    assert said == [
        "a.tar, sample x: looks odd; another sample replaces it. More are counted as bad/truncated_image",
        "a.tar, sample x: looks odd; converted. More are counted as converted/cmyk",
    ]


def test_without_a_listener_faults_go_to_the_log(caplog):
    FaultWatch([10], ["a.tar"]).check(report(Fault.TREES_STALE))
    assert "taken as one phrase. More are counted as trees/stale" in caplog.text


def test_a_strict_run_ends_at_the_first_fault():
    with pytest.raises(UserError, match=r"a\.tar, sample x: looks odd \(converted/16_bit\); data\.strict: false"):
        FaultWatch([10], ["a.tar"], strict=True).check(report(Fault.DEEP))


def test_a_shard_with_too_many_bad_samples_ends_the_run():
    watch = FaultWatch([20, 20], ["a.tar", "b.tar"], max_bad=0.1, warn=lambda text: None)
    watch.check(report(Fault.TRUNCATED, bad=[(0, 0, 3), (0, 0, 4), (0, 1, 3), (0, 1, 4)]))
    # The same ones again are no more than they were.
    watch.check(report(Fault.TRUNCATED, bad=[(0, 0, 3), (0, 0, 4)]))
    watch.check(report(Fault.TRUNCATED, bad=[(1, 0, 3), (1, 0, 4)]))
    with pytest.raises(
        UserError,
        match=r"shard b\.tar: 3 of 20 samples are bad so far, more than data\.max_bad \(0\.1\) allows "
        r"\(a\.tar, sample x: looks odd \(bad/truncated_image\)\); copy the shard again",
    ):
        watch.check(report(Fault.TRUNCATED, bad=[(1, 1, 3), (1, 1, 4), (1, 1, 9)]))


def test_a_rank_of_many_is_not_ended_by_chance_but_by_a_shard_that_is_bad():
    def met(bad: int) -> None:
        watch = FaultWatch([8000], ["a.tar"], max_bad=0.1, world_size=100, warn=lambda text: None)
        watch.check(report(Fault.TRUNCATED, bad=[(0, 0, number) for number in range(bad)]))

    met(15)  # of the 80 samples that this rank sees in an epoch, 8 are expected at the limit
    with pytest.raises(UserError, match=r"more than data\.max_bad"):
        met(30)
