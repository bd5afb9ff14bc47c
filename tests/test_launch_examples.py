"""The launch examples: shells, Kubernetes and Python can read them, and they name what exists."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import yaml

from powerclip.runtime.signals import EXIT_PREEMPTED
from powerclip.train.recipe import find_recipe

LAUNCH = Path(__file__).resolve().parents[1] / "docs" / "launch"


def test_the_slurm_script_is_a_script_that_queues_a_stopped_job_again():
    path = LAUNCH / "slurm.sh"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    assert f'"$code" -eq {EXIT_PREEMPTED}' in text
    assert "scontrol requeue" in text
    find_recipe(re.search(r"recipes/\S+\.yaml", text)[0])


def test_the_kubernetes_job_starts_a_recipe_that_exists_and_leaves_time_to_stop():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    find_recipe(next(part for part in command if part.startswith("--recipe=")).removeprefix("--recipe="))
    assert command[-2:] == ["--resume", "auto"]
    nodes = int(next(part for part in command if part.startswith("--nnodes=")).removeprefix("--nnodes="))
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == nodes
    assert pod["subdomain"] == service["metadata"]["name"]
    patience = {item["name"]: item["value"] for item in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(patience) < pod["terminationGracePeriodSeconds"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_ray_script_is_python_that_resumes():
    text = (LAUNCH / "ray_train.py").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [keyword.value.value for call in calls for keyword in call.keywords if keyword.arg == "resume"]
    assert named == ["auto"]
