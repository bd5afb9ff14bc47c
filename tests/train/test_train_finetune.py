"""Fine-tuning: what is frozen stays, rates fall with depth, adapters are merged into a plain model."""

from __future__ import annotations

import signal
from pathlib import Path

import open_clip
import pytest
import torch
from tiny_run import same_weights, tiny, weights

from powerclip.encoders.self_attention import SelfAttention
from powerclip.errors import UserError
from powerclip.runtime.signals import Preempted
from powerclip.train.finetune import adapter_state, is_adapted, merged, rates, towers_of
from powerclip.train.loop import train
from powerclip.train.memory import activation_bytes, synthetic_batch
from powerclip.train.state import TrainState, start

DEEP = ["model.config.vision_cfg.layers=2", "model.config.text_cfg.layers=2"]


def changed(recipe, run: Path) -> dict[str, bool]:
    """Which weights a run has moved."""
    first = start(recipe).encoder.clip.state_dict()
    return {name: not torch.equal(value, first[name]) for name, value in weights(run).items()}


@pytest.mark.parametrize(
    ("freeze", "stays"),
    [
        ("image", ("visual.",)),
        ("text", ("token_embedding", "positional_embedding", "transformer.", "ln_final", "text_projection")),
        (
            "image:1,text:2",
            (
                "visual.conv1",
                "visual.class_embedding",
                "visual.positional_embedding",
                "visual.ln_pre",
                "visual.transformer.resblocks.0.",
                "token_embedding",
                "positional_embedding",
                "transformer.",
            ),
        ),
    ],
)
def test_what_is_frozen_stays_and_the_rest_moves(tmp_path, freeze, stays):
    recipe = tiny(tmp_path, *DEEP, f"train.freeze='{freeze}'", "train.steps=2", "optim.weight_decay=0.5")
    train(recipe, tmp_path / "run", quiet=True)
    moved = changed(recipe, tmp_path / "run")
    assert moved == {name: not name.startswith(stays) for name in moved}


def test_frozen_parameters_have_no_gradient_no_optimiser_state_and_no_graph(tmp_path):
    recipe = tiny(tmp_path, *DEEP, "train.freeze='image,text:1'", "train.accumulate=2")
    state, whole = start(recipe), start(tiny(tmp_path, *DEEP))
    from powerclip.train.loop import train_step

    train_step(state, synthetic_batch(recipe, state.encoder, 4), recipe)
    frozen = [p for p in state.encoder.parameters() if not p.requires_grad]
    assert len(frozen) > 20
    assert all(p.grad is None and p not in state.optimizer.state for p in frozen)
    held = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
    assert held.isdisjoint(map(id, frozen))
    assert activation_bytes(state) < 0.5 * activation_bytes(whole)


@pytest.mark.parametrize(
    ("parts", "drawn"),
    [
        ("image", ("visual.",)),
        (
            "text,heads",
            ("token_embedding", "positional_embedding", "transformer.", "ln_final", "text_projection", "visual.proj"),
        ),
        ("heads", ("visual.proj", "text_projection")),
        ("image,text", ("",)),
    ],
)
def test_what_is_drawn_anew_is_what_the_seed_draws_and_the_rest_is_pretrained(tmp_path, parts, drawn):
    train(tiny(tmp_path, "train.steps=1", "train.seed=5"), tmp_path / "first", quiet=True)
    pretrained = weights(tmp_path / "first")
    scratch = start(tiny(tmp_path, "train.seed=3")).encoder.clip.state_dict()
    recipe = tiny(
        tmp_path, "model.config=null", f"model.pretrained={tmp_path}/first", f"model.redraw='{parts}'", "train.seed=3"
    )
    state = start(recipe).encoder.clip.state_dict()
    for name, value in state.items():
        if name != "logit_scale":
            assert torch.equal(value, (scratch if name.startswith(drawn) else pretrained)[name]), name
    assert torch.equal(state["logit_scale"], pretrained["logit_scale"])


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["model.redraw=text"], "model.redraw is for pretrained weights"),
        (
            ["model.redraw=words", "model.pretrained=x"],
            "must name parts, such as text, heads or image,text, not 'words'",
        ),
        (["model.redraw=''", "model.pretrained=x"], "must name parts"),
    ],
)
def test_what_cannot_be_drawn_anew_is_refused(tmp_path, overrides, complaint):
    with pytest.raises(UserError, match=complaint):
        tiny(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("freeze", "complaint"),
    [
        ("vision", "must name towers and depths"),
        ("image:x", "must name towers and depths"),
        ("image,image:2", "must name towers and depths"),
        ("image:9", "the image tower has 1 blocks"),
        ("image,text", "leaves no tower to train"),
    ],
)
def test_what_cannot_be_frozen_is_refused(tmp_path, freeze, complaint):
    with pytest.raises(UserError, match=complaint):
        start(tiny(tmp_path, f"train.freeze='{freeze}'"))


def test_rates_fall_layer_by_layer_from_the_heads_down(tmp_path):
    recipe = tiny(tmp_path, *DEEP, "train.layer_decay=0.5", "optim.warmup=0")
    state = start(recipe)
    factor = rates(state.encoder, 0.5)
    visual = state.encoder.clip.visual
    assert [factor[block.attn.in_proj_weight] for block in visual.transformer.resblocks] == [0.25, 0.5]
    assert factor[visual.conv1.weight] == factor[state.encoder.clip.token_embedding.weight] == 0.125
    assert visual.proj not in factor
    from powerclip.train.loop import train_step

    train_step(state, synthetic_batch(recipe, state.encoder, 4), recipe)
    used = {id(p): group["lr"] for group in state.optimizer.param_groups for p in group["params"]}
    assert len(used) == len(list(state.encoder.parameters())) + 1  # and the alignment's scale
    assert all(used[id(p)] == pytest.approx(1e-3 * factor.get(p, 1.0)) for p in state.encoder.parameters())
    decays = {id(p): group["weight_decay"] for group in state.optimizer.param_groups for p in group["params"]}
    assert all(decays[id(p)] == (0.2 if p.ndim >= 2 else 0) for p in state.encoder.parameters())


def test_towers_are_divided_without_rest(tmp_path):
    encoder = start(tiny(tmp_path)).encoder
    counted = 0
    for tower in towers_of(encoder).values():
        counted += len(tower.embeddings) + len(tower.head) + sum(len(list(b.parameters())) for b in tower.blocks)
        assert len(tower.projection) == 1
    assert counted == len(list(encoder.parameters())) - 1  # the logit scale


def lora(folder: Path, *overrides: str):
    return tiny(folder, "train.lora=2", "optim.lr=1e-2", "train.steps=6", "train.checkpoint_every=0", *overrides)


def test_adapters_start_as_nothing_and_are_merged_into_a_model_that_open_clip_reads(tmp_path):
    recipe = lora(tmp_path, "train.freeze=text")
    state, plain = start(recipe), start(tiny(tmp_path, "train.freeze=text"))
    batch = synthetic_batch(recipe, state.encoder, 4)
    with torch.no_grad():
        assert torch.allclose(
            state.encoder(batch.images, batch.tokens).image, plain.encoder(batch.images, batch.tokens).image
        )
    assert all("visual" in name for name in adapter_state(state.encoder))

    result = train(recipe, tmp_path / "run", quiet=True)
    assert not is_adapted(result.encoder)
    moved = {name for name, has in changed(tiny(tmp_path), tmp_path / "run").items() if has}
    block = "visual.transformer.resblocks.0"
    matrices = ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    assert moved == {f"{block}.{name}" for name in matrices} | {"visual.proj", "logit_scale"}
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'run' / 'model'}")
    with torch.no_grad():
        assert torch.allclose(
            model.encode_image(batch.images, normalize=True), result.encoder.encode_image(batch.images), atol=1e-6
        )


def test_a_merged_model_computes_what_its_adapters_do(tmp_path):
    recipe = lora(tmp_path)
    state = start(recipe)
    for name, parameter in state.encoder.named_parameters():
        if name.endswith(".up"):
            torch.nn.init.normal_(parameter, std=0.1)
    batch = synthetic_batch(recipe, state.encoder, 4)
    state.encoder.eval()
    with torch.no_grad():
        adapted, plain = state.encoder(batch.images, batch.tokens), merged(state.encoder)(batch.images, batch.tokens)
    assert torch.allclose(adapted.patches, plain.patches, atol=1e-5)
    assert torch.allclose(adapted.words, plain.words, atol=1e-5)


def test_a_run_with_adapters_resumes_bit_equal(tmp_path):
    recipe = lora(tmp_path, "train.accumulate=2")

    def stop(state: TrainState) -> None:
        if state.step == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Preempted):
        train(recipe, tmp_path / "run", quiet=True, on_step=stop)
    train(recipe, tmp_path / "run", quiet=True, resume=True)
    train(recipe, tmp_path / "whole", quiet=True)
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_a_run_with_adapters_goes_on_after_a_checkpoint(tmp_path):
    train(lora(tmp_path, "train.checkpoint_every=1", "train.keep=9"), tmp_path / "run", quiet=True)
    train(lora(tmp_path, "train.checkpoint_every=0"), tmp_path / "without", quiet=True)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) > 1
    assert same_weights(tmp_path / "run", tmp_path / "without")


@pytest.mark.parametrize("overrides", [["train.layer_decay=0.9"], ["train.sharding=full"], ["train.lora=-1"]])
def test_what_does_not_go_with_adapters_is_refused(tmp_path, overrides):
    with pytest.raises(UserError, match=r"train\.lora"):
        tiny(tmp_path, "train.lora=2", *overrides)


def test_adapted_towers_keep_packed_attention_and_can_be_compiled(tmp_path):
    recipe = lora(tmp_path, "objective=flip", "train.steps=1")  # masks patches, for which attention takes lengths
    state = start(recipe)
    blocks = state.encoder.clip.visual.transformer.resblocks
    assert all(isinstance(block.attn, SelfAttention) for block in blocks)
    batch = synthetic_batch(recipe, state.encoder, 4)

    def image(images: torch.Tensor) -> torch.Tensor:
        return state.encoder.image_features(images).image

    compiled = torch.compile(image, dynamic=False, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(batch.images), image(batch.images), atol=1e-6)
