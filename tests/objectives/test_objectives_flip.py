"""FLIP: masked steps, then tuning on whole images with a learning rate of its own."""

from __future__ import annotations

import torch
from tiny_batches import encode, terms_of, tiny_batch, tiny_encoder

from powerclip.objectives import Clip, Flip, FlipSettings, Phase


def test_flip_tunes_on_whole_images_at_the_end():
    encoder, batch = tiny_encoder(), tiny_batch(4)
    objective = Flip(FlipSettings(keep=0.25, tuning=0.1))
    lengths = []
    encoder.clip.visual.transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    for step, patches in ((0, 4), (89, 4), (90, 16), (99, 16)):
        objective.progress(step, 100)
        encode(objective, encoder, batch)
        assert lengths[-1] == 1 + patches
    whole = terms_of(objective, encoder, batch).total
    assert torch.equal(whole, terms_of(Clip(), encoder, batch).total)


def test_flips_tuning_has_a_learning_rate_of_its_own():
    objective = Flip(FlipSettings(tuning=0.1, tuning_rate=0.02))
    assert objective.phase(89, 100) == Phase(0, 90)
    assert objective.phase(90, 100) == Phase(90, 100, 0.02)
    assert Flip(FlipSettings(tuning=0.0)).phase(99, 100) == Phase(0, 100)
