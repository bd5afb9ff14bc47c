"""What runs on a GPU alone: its record, and the sums of its kernels' times, without one."""

import json
import sys
from pathlib import Path

import gpu_tests
import pytest
import step_profile
import torch

from powerclip.errors import UserError

TESTS = Path(__file__).parents[1]

XML = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" file="tests/a.py" time="1.5"/>
<testcase classname="tests.a" name="two" file="tests/a.py" time="2"><failure message="assert 1
 == 2">…</failure></testcase>
<testcase classname="tests.b" name="three" file="tests/b.py" time="0"><skipped message="needs a GPU"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("benchmark", [gpu_tests, step_profile])
def test_without_a_gpu_it_says_so_in_a_line(benchmark, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(UserError, match=r"no (NVIDIA )?GPU here") as raised:
        benchmark.main()
    assert len(str(raised.value).splitlines()) == 1


def test_the_record_says_what_ran_and_how_it_ended(tmp_path):
    path = tmp_path / "tests.xml"
    path.write_text(XML)
    cases = gpu_tests.read_cases(path)
    assert [(case.name, case.outcome, case.message) for case in cases] == [
        ("one", "passed", ""),
        ("two", "failed", "assert 1 == 2"),
        ("three", "skipped", "needs a GPU"),
    ]
    text = gpu_tests.record(cases, 1, 12.3, tmp_path)
    assert "1 passed, 1 failed, 1 skipped, in 12 s" in text
    assert "| `tests/a.py` | 1 | 1 | 0 | 4 |" in text
    (written,) = tmp_path.glob("*-gpu-tests.json")
    saved = json.loads(written.read_text())
    assert (saved["exit"], saved["failed"], len(saved["tests"])) == (1, 1, 3)
    assert saved["origin"]["torch"]


def test_tests_that_run_kernels_are_marked():
    files = [
        path
        for path in TESTS.rglob("test_*.py")
        if "from kernel_examples" in path.read_text() and "cpu" not in path.stem
    ]
    assert len(files) >= 5
    assert not [path.name for path in files if "pytest.mark.kernels" not in path.read_text()]


def test_a_profile_counts_gaps_and_kernels_side_by_side():
    events = [
        ("nvjet_sm90_hss_256x160", 0.0, 4000.0),
        ("triton_poi_fused_gelu_0", 1000.0, 3000.0),  # on another stream
        ("cudnn_generated_fort_native_sdpa_sm90", 5000.0, 6000.0),
        ("Memcpy DtoD", 6000.0, 8000.0),
    ]
    one = step_profile.summary(events, steps=2)
    assert (one.span, one.busy, one.gaps, one.launches) == (4.0, 3.5, 0.5, 2.0)
    assert one.kinds == {
        "products": 2.0,
        "fused, element by element": 1.0,
        "attention": 0.5,
        "copies": 1.0,
    }
    assert one.kernels[0] == ("nvjet_sm90_hss_256x160", 2.0, 0.5)
