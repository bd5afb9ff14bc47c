import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

from powerclip.data import scenes as data
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import build
from powerclip.evaluate.composition import KINDS
from powerclip.evaluate.scenes import evaluate_scenes, scene_images

SIZE, PATCH, COUNT = 32, 4, 60
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(scope="module")
def tokenizer():
    return CaptionTokenizer()


class Oracle(torch.nn.Module):
    """Knows each picture's caption, class and boxes. Texts are random directions, the same text always the same."""

    grid, image_size = (SIZE // PATCH, SIZE // PATCH), (SIZE, SIZE)
    clip = SimpleNamespace(visual=SimpleNamespace(preprocess_cfg={"mean": CLIP_MEAN, "std": CLIP_STD}))

    def __init__(self, tokenizer):
        super().__init__()
        self.directions = torch.nn.Parameter(torch.randn(49408, 256, generator=torch.Generator().manual_seed(0)))
        self.tokenizer = tokenizer
        zero_shot = data.scene_batch(range(COUNT // 2), 0, "zero_shot")
        self.scenes = {self.key(image): scene for batch in (data.test_scenes(COUNT, 0), zero_shot)
                       for image, scene in zip(scene_images(self, batch), batch, strict=True)}  # fmt: skip

    @staticmethod
    def key(image):
        return image.cpu().numpy().tobytes()

    def encode_text(self, tokens):
        # A sum over position-dependent directions: other words or another order give another direction.
        places = torch.arange(1, tokens.shape[1] + 1)[None, :, None]
        return normalize((self.directions[tokens] * (tokens > 0)[..., None] * (2 + places.sqrt().cos())).sum(1), dim=-1)

    def encode_words(self, tokens):
        return self.encode_text(tokens), self.directions[tokens]

    def embed(self, text):
        return self.encode_text(self.tokenizer.pad([self.tokenizer.encode(text).ids]))[0]

    def encode_patches(self, images):
        globals_, patches = [], []
        for image in images:
            scene = self.scenes[self.key(image)]
            one = torch.zeros(self.grid[0] * self.grid[1], 256)
            for span, (x0, y0, x1, y1) in scene.phrase_boxes:
                words = self.tokenizer.encode(scene.caption)
                phrase = [
                    i for i, (s, e) in zip(words.ids, words.spans, strict=True) if s < e and span.start <= s < span.end
                ]
                row, column = int((y0 + y1) / 2 * self.grid[0]), int((x0 + x1) / 2 * self.grid[1])
                own = normalize(self.directions[torch.tensor(phrase)].sum(0), dim=0)
                one[row * self.grid[1] + column] += own + self.embed(scene.caption[span.start : span.end])
            patches.append(one)
            if scene.split == "zero_shot":
                name = data.zero_shot_classes()[data.zero_shot_label(scene)]
                globals_.append(self.embed(f"{'an' if name[0] in 'aeiou' else 'a'} {name}"))
            else:
                globals_.append(self.embed(scene.caption))
        return torch.stack(globals_), torch.stack(patches)


def test_a_model_that_knows_the_answers_scores_everything(tokenizer):
    results = evaluate_scenes(Oracle(tokenizer), tokenizer, count=COUNT, seed=0)
    assert results.retrieval.mean == 1.0
    assert results.zero_shot[1] == 1.0
    assert results.composition == dict.fromkeys(KINDS, 1.0)
    assert results.pointing["text"] > 0.95  # a repeated mention of one object shares its patch
    assert results.pointing["words"] > 0.95
    assert results.pointing_any["words"] >= results.pointing["words"]
    assert results.chance < results.chance_any < 0.5


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    vision = {"image_size": SIZE, "patch_size": 8, "head_width": 16, **tower}
    text = {"context_length": 77, "vocab_size": 49408, "heads": 2, **tower}
    return build(config={"embed_dim": 16, "vision_cfg": vision, "text_cfg": text})


def test_an_untrained_model_is_about_as_good_as_chance(tiny, tokenizer):
    results = evaluate_scenes(tiny, tokenizer, count=200, seed=0)
    assert results.retrieval.text[1] < 0.05
    assert results.composition_mean == pytest.approx(0.5, abs=0.15)
    assert results.counts["retrieval"] == 200
    assert results.counts["composition"] > 100


def test_evaluation_repeats_exactly_and_leaves_the_model_as_it_was(tiny, tokenizer):
    tiny.train()
    first = evaluate_scenes(tiny, tokenizer, count=30, seed=1)
    assert tiny.training
    assert all(parameter.requires_grad for parameter in tiny.parameters())
    assert evaluate_scenes(tiny, tokenizer, count=30, seed=1) == first
    assert evaluate_scenes(tiny, tokenizer, count=30, seed=2) != first


def test_results_are_plain_json_with_the_means(tiny, tokenizer):
    results = evaluate_scenes(tiny, tokenizer, count=30, seed=0)
    stored = json.loads(json.dumps(results.to_dict()))
    assert stored["retrieval"]["text"]["5"] == results.retrieval.text[5]
    assert stored["composition_mean"] == results.composition_mean
    assert set(stored["composition_groups"]) == {"obj", "att", "rel"}
