"""Shards over a Ray cluster: actors on CPUs for trees, on GPUs for regions.

An actor that dies, with its machine or alone, is replaced, and its shard begun again. As a sidecar is written in one
step and a shard has one result, nothing is lost and nothing counted twice. Shards and sidecars must be on storage that
all machines reach under the same names, and powerclip installed on each.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from powerclip.annotate.job import Job
from powerclip.annotate.pipeline import OnSamples, ShardResult, State
from powerclip.errors import UserError
from powerclip.runtime.processes import ATTEMPTS

# Shards travel through files, not through Ray: the smallest store that it accepts.
_OBJECT_STORE = 80 * 2**20


def run_ray(
    shards: Sequence[str],
    job: Job,
    workers: int | None,
    stop: Callable[[], bool],
    on_samples: OnSamples,
    address: str | None = None,
) -> Iterator[ShardResult]:
    """The results of the shards, as they are finished; how far a shard is, is not reported.

    Args:
        shards: tars, under names that hold on every machine.
        job: what to do.
        workers: actors; None for as many as the cluster has room for.
        stop: whether to begin no further shard.
        on_samples: called with the samples of each finished shard.
        address: of the cluster (`auto`, `ray://head:10001`); None starts one on this machine.

    Raises:
        UserError: Ray is not installed, or the cluster does not answer.
    """
    ray = connect(address, workers or job.default_workers())
    try:
        yield from run_on_actors(ray, shards, job, min(workers or _slots(ray, job), len(shards)), stop, on_samples)
    finally:
        ray.shutdown()


class ShardActor:
    """Runs on a machine of the cluster with its own copy of the annotator."""

    def __init__(self, job: Job):
        self._job = job
        self._annotator: Any = None

    def ready(self) -> None:
        """Return once the actor runs."""

    def annotate(self, shard: str) -> ShardResult:
        """Bring the sidecar of a shard up to date."""
        if self._annotator is None:  # loaded here, so that an error of the job is raised as itself
            self._annotator = self._job.load()
        return self._annotator.annotate(shard)


def connect(address: str | None, workers: int) -> Any:
    """Ray, connected to the cluster at `address`, or to one with so many slots that is started here."""
    try:
        import ray
    except ImportError:
        raise UserError("--engine ray needs Ray: pip install 'powerclip[ray]'") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        # As many slots as actors: they share the cores as local processes would.
        ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=_OBJECT_STORE, **quiet)
        return ray
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"no Ray cluster answers at {address}: {reason}") from None
    return ray


def run_on_actors(
    ray: Any, shards: Sequence[str], job: Job, workers: int, stop: Callable[[], bool], on_samples: OnSamples
) -> Iterator[ShardResult]:
    """The results of the shards from a cluster that is connected."""
    resources = {"num_cpus": 1, "num_gpus": 1} if _wants_gpu(ray, job) else {"num_cpus": 1}
    remote = ray.remote(**resources)(ShardActor)
    waiting, deaths, failed_starts = deque(shards), Counter[str](), 0
    idle: list[Any] = []  # actors
    working: dict[Any, tuple[Any, str]] = {}  # future result → actor and shard
    starting: dict[Any, Any] = {}  # future start → actor; one may have to wait for its resources
    while True:  # actors end when nothing refers to them any more
        while len(idle) + len(working) + len(starting) < workers:
            actor = remote.remote(job)
            starting[actor.ready.remote()] = actor
        while idle and waiting and not stop():
            actor, shard = idle.pop(), waiting.popleft()
            working[actor.annotate.remote(shard)] = actor, shard
        if not working and (stop() or not waiting):
            return
        finished, _ = ray.wait([*working, *starting], num_returns=1, timeout=0.5)
        for future in finished:
            if future in starting:
                actor = starting.pop(future)
                try:
                    ray.get(future)
                except ray.exceptions.RayError as error:
                    failed_starts += 1
                    if failed_starts >= ATTEMPTS:
                        reason = str(error).strip().splitlines()[-1]
                        raise UserError(f"no worker starts on the Ray cluster: {reason}") from None
                else:
                    failed_starts = 0
                    idle.append(actor)
                continue
            actor, shard = working.pop(future)
            try:
                result = ray.get(future)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise UserError(str(error.cause)) from None
                raise
            except ray.exceptions.RayError:  # the actor, its machine, or its memory
                deaths[shard] += 1
                if deaths[shard] >= ATTEMPTS:
                    yield ShardResult(shard, State.FAILED, reason="every actor that tried it died")
                elif not stop():
                    waiting.appendleft(shard)
                continue
            idle.append(actor)
            on_samples(shard, result.samples if result.state is not State.DONE else 0, result.samples)
            yield result


def _slots(ray: Any, job: Job) -> int:
    """How many actors the cluster has room for."""
    return max(1, int(ray.cluster_resources().get("GPU" if _wants_gpu(ray, job) else "CPU", 0)))


def _wants_gpu(ray: Any, job: Job) -> bool:
    """Regions are found on GPUs when the cluster has any; parsers are quick on CPUs, of which there are more."""
    if job.kind == "trees" or job.name in ("superpixels", "coco") or job.device == "cpu":
        return job.device.startswith("cuda")
    return ray.cluster_resources().get("GPU", 0) > 0
