"""Upload to a stand-in of the hub and load from there, with the real client; nothing is sent unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import torch
from hub_stand_in import TOKEN, Hub, running_hub
from tiny_model import save_tiny_model, tiny_model
from typer.testing import CliRunner

import powerclip
from powerclip import cli
from powerclip.errors import UserError
from powerclip.export import push
from powerclip.export.push import PushOptions, push_model, upload

ROOT = Path(powerclip.__file__).parents[1]
REPO = "org/tiny"

# One process for both: its imports take longer than the work. The client reads HF_ENDPOINT when it is imported.
PUSH_AND_LOAD = """
import sys
from powerclip.cli import main
sys.argv = ["powerclip", "push", sys.argv[1], "org/tiny", "--private", "--yes"]
try:
    main()
except SystemExit as left:
    assert not left.code, left.code
import open_clip, powerclip, torch
pixels = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
model, _, tokenizer = powerclip.load("hf-hub:org/tiny")
theirs, _ = open_clip.create_model_from_pretrained("hf-hub:org/tiny")
with torch.inference_mode():
    embeddings = model.encode_image(pixels), theirs.encode_image(pixels, normalize=True)
    text = model.encode_text(tokenizer(["a red ball"]))
print("EMBEDDINGS", [value.flatten().tolist() for value in (*embeddings, text)])
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def client(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """This process's client speaks to the stand-in, with its token and in the older way of uploading large files."""
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, endpoint=hub.address, token=TOKEN))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    return hub


def test_what_was_pushed_loads_from_the_hub_in_powerclip_and_in_open_clip(hub, saved, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",  # the stand-in has the older way of uploading large files
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", PUSH_AND_LOAD, str(saved)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert hub.private == {REPO: True}
    names = {name.removeprefix(f"{REPO}/") for name in hub.files}
    assert names >= {
        *("README.md", "open_clip_config.json", "open_clip_model.safetensors", "config.json", "model.safetensors"),
        *("tokenizer.json", "preprocessor_config.json", "onnx/vision_model.onnx", "onnx/text_model.onnx"),
    }
    for name in names:
        assert name in done.stdout  # shown before it was sent
    card = hub.files[f"{REPO}/README.md"].decode()
    for form in ("hf fp32", "onnx fp32"):
        assert f"| {form} | image_embeds" in card

    model = tiny_model()
    weights = safetensors.torch.load(hub.files[f"{REPO}/open_clip_model.safetensors"])
    assert all(torch.equal(value, weights[name]) for name, value in model.clip.state_dict().items())
    with torch.inference_mode():
        expected = model.encode_image(torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32))[0]
    ours, theirs, text = map(torch.tensor, json.loads(done.stdout.split("EMBEDDINGS")[1]))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-6)
    assert text.shape == (16,)


@pytest.fixture
def small_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is exported: these tests are about what is sent."""

    def fill(source: object, repo: str, folder: Path, *_: object) -> None:
        (folder / "README.md").write_text("# a model\n")
        (folder / "open_clip_model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(push, "fill_folder", fill)


@pytest.mark.usefixtures("small_folder")
def test_a_dry_run_and_a_no_send_nothing(client, capsys):
    assert push_model("model", REPO, PushOptions(dry_run=True, onnx=())) is None
    assert push_model("model", REPO, PushOptions(onnx=()), confirm=lambda: False) is None
    printed = capsys.readouterr().out
    assert "open_clip_model.safetensors" in printed
    assert printed.count("nothing was sent") == 2
    assert client.requests == []


@pytest.mark.usefixtures("small_folder")
def test_what_should_be_private_is_not_sent_to_a_public_repository(client):
    client.private[REPO] = False
    with pytest.raises(UserError, match=f"{REPO} is there and public: nothing was sent"):
        push_model("model", REPO, PushOptions(private=True, onnx=()))
    assert client.files == {}
    push_model("model", REPO, PushOptions(onnx=()))
    assert client.files[f"{REPO}/open_clip_model.safetensors"] == b"weights"


def test_what_the_hub_refuses_is_one_line(client, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(huggingface_hub.HfApi, token="hf_wrong"))
    (tmp_path / "README.md").write_text("# a model\n")
    with pytest.raises(UserError, match=f"could not upload to {REPO}: .*401"):
        upload(tmp_path, REPO, PushOptions())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model", "no-organisation", "--yes"], "write org/name"),
        (["model", "org/name"], "there is no terminal to ask on"),
        (["model", "org/name", "--yes", "--onnx", "int8", "--no-onnx"], "contradict each other"),
    ],
)
def test_a_push_that_cannot_be_meant_is_refused(arguments, said):
    assert said in str(CliRunner().invoke(cli.app, ["push", *arguments]).exception)
