"""A real Ray with two workers, one of which is killed: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import os
import signal
from collections import Counter

import annotate_examples
import pytest
from annotate_examples import SlowJob, make_shards

from powerclip.annotate.engine_ray import connect, run_on_actors, run_ray
from powerclip.annotate.job import Job
from powerclip.annotate.pipeline import State
from powerclip.annotate.run_shards import StopOnInterrupt, annotate
from powerclip.errors import UserError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'powerclip[ray]'")


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two workers. The actors cannot import the tests' own modules: they get their content instead."""
    ray.cloudpickle.register_pickle_by_value(annotate_examples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # Ray's own 15 would stand behind all tests that run beside this one
        yield connect(None, 2)
        ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(annotate_examples)


def test_when_an_actor_is_killed_nothing_is_lost_and_nothing_comes_twice(tmp_path, cluster):
    shards = make_shards(tmp_path / "shards", 10)
    (tmp_path / "pids").mkdir()
    job = SlowJob("trees", "words", tmp_path / "side", pids=tmp_path / "pids")
    samples: Counter[str] = Counter()
    ended, killed = [], 0
    with StopOnInterrupt() as stop:
        for result in run_on_actors(
            cluster, shards, job, 2, stop, lambda shard, done, of: samples.update({shard: done})
        ):
            ended.append(result)
            if not killed:
                killed = job.running()[-1]
                os.kill(killed, signal.SIGKILL)
    assert killed
    assert sorted(result.shard for result in ended) == shards
    assert {result.state for result in ended} <= {State.NEW, State.DONE}
    assert set(samples.values()) <= {0, 3}  # a shard that was written just before its actor died is done already
    annotate(shards, SlowJob("trees", "words", tmp_path / "calm", seconds=0), workers=1, quiet=True)
    for path in (tmp_path / "calm").iterdir():
        assert (tmp_path / "side" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "side").iterdir())) == 10


def test_what_an_actor_finds_wrong_with_the_job_is_one_clear_line(tmp_path, cluster):
    shards = make_shards(tmp_path / "shards", 2)
    wrong = Job("regions", "superpixels", tmp_path, options={"mots": 3})
    with StopOnInterrupt() as stop, pytest.raises(UserError, match="did you mean 'most'"):
        list(run_on_actors(cluster, shards, wrong, 1, stop, lambda *_: None))


def test_a_cluster_that_does_not_answer_is_one_clear_line(tmp_path, cluster):
    with pytest.raises(UserError, match="no Ray cluster answers at nonsense"):
        run_ray(["0.tar"], Job("trees", "flat", tmp_path), 1, StopOnInterrupt(), lambda *_: None, "nonsense").__next__()


def test_more_workers_than_the_cluster_has_room_for_hold_nothing_up(tmp_path, cluster):
    shards = make_shards(tmp_path / "shards", 5)
    job = SlowJob("trees", "words", tmp_path / "side", seconds=0)
    with StopOnInterrupt() as stop:
        results = list(run_on_actors(cluster, shards, job, 4, stop, lambda *_: None))
    assert sorted(result.shard for result in results) == shards
