"""Train on a Ray cluster: one process for each GPU, all of them started again when a node is lost.

    python docs/launch/ray_train.py recipes/powerclip_r_b16_cc12m.yaml /shared/runs/powerclip-r --ranks 64
    python docs/launch/ray_train.py quickstart/clip runs/ray --ranks 2 --cpu train.steps=40    # to try it out

The run folder and the data must lie where all nodes see them. Nothing but Ray itself is needed (`pip install ray`).
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
class Rank:
    """A process that trains; Ray shows it its own GPU only."""

    def address(self) -> tuple[str, int]:
        """Where the others can meet this one."""
        with socket.socket() as taken:
            taken.bind(("", 0))
            return ray.util.get_node_ip_address(), taken.getsockname()[1]

    def train(
        self, rank: int, count: int, meet: tuple[str, int], recipe: str, output: str, overrides: list[str]
    ) -> int:
        """Train as one of `count` ranks; gives the number of steps."""
        host, port = meet
        where = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "MASTER_ADDR": host, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in where.items()})
        from powerclip.train.loop import train
        from powerclip.train.recipe import load_recipe

        return train(load_recipe(recipe, overrides), output, resume="auto").results.steps


class Lost(Exception):
    """A process or its node is gone; the run can go on without it having done anything wrong."""


def launch(recipe: str, output: str, overrides: Sequence[str], ranks: int, resources: dict[str, float]) -> int:
    """Start all ranks at once, or none, and wait for them."""
    group = placement_group([resources] * ranks, strategy="PACK")
    ray.get(group.ready())
    strategy = PlacementGroupSchedulingStrategy(group)
    options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "scheduling_strategy": strategy}
    workers = [Rank.options(**options).remote() for _ in range(ranks)]
    try:
        meet = ray.get(workers[0].address.remote())
        given = (meet, recipe, output, list(overrides))
        return wait([worker.train.remote(rank, ranks, *given) for rank, worker in enumerate(workers)])
    finally:
        for worker in workers:
            ray.kill(worker)
        remove_placement_group(group)


def wait(jobs: list[ray.ObjectRef]) -> int:
    """The number of steps when all are done; Lost when a process is gone, whatever the others then say of it."""
    waiting, errors = jobs, []
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=60 if errors else None)
        if not done:  # the rest would wait for the one that failed
            break
        try:
            steps = ray.get(done[0])
        except RayError as error:
            errors.append(error)
    if any(isinstance(error, RayActorError) for error in errors):
        raise Lost
    if errors:
        raise errors[0]
    return steps


def main() -> None:
    """Train to the end, however often it takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe file, or the name of a shipped one")
    parser.add_argument("output", help="the run's folder, on a file system that all nodes share")
    parser.add_argument("overrides", nargs="*", help="settings to change in the recipe: key=value")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cpus", type=int, default=8, help="for each rank")
    parser.add_argument("--cpu", action="store_true", help="ranks of one CPU and no GPU")
    parser.add_argument("--retries", type=int, default=100)
    arguments = parser.parse_intermixed_args()
    ray.init()
    resources = {"CPU": 1.0} if arguments.cpu else {"CPU": float(arguments.cpus), "GPU": 1.0}
    output = os.path.abspath(arguments.output)
    for _ in range(arguments.retries + 1):
        try:
            steps = launch(arguments.recipe, output, arguments.overrides, arguments.ranks, resources)
        except Lost:
            print("a rank was lost: all start again from the newest checkpoint", flush=True)
        else:
            print(f"finished after {steps} steps")
            return
    raise SystemExit(f"ranks were lost more than {arguments.retries} times")


if __name__ == "__main__":
    main()
