from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

from powerclip.data import scenes as data
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, build
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.metrics import KINDS
from powerclip.evaluate.scenes import scene_grounding, scene_images, scene_tasks

SIZE, PATCH, COUNT = 32, 4, 60
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(scope="module")
def tokenizer():
    return CaptionTokenizer()


class Oracle(torch.nn.Module):
    """Knows each image's caption, class and boxes. Texts are random directions, the same text always the same."""

    grid, image_size, embed_dim = (SIZE // PATCH, SIZE // PATCH), (SIZE, SIZE), 256
    clip = SimpleNamespace(visual=SimpleNamespace(preprocess_cfg={"size": SIZE, "mean": CLIP_MEAN, "std": CLIP_STD}))

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

    def encode_image(self, images):
        return self.encode_patches(images)[0]

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


def score(encoder, tokenizer, count=COUNT, seed=0):
    """`TASK/metric` → share, and the counts of each task."""
    embedder = Embedder(encoder, tokenizer)
    scored = {name: task.score(embedder) for name, task in scene_tasks(count, SIZE, seed).items()}
    flat = {f"{name}/{metric}": value for name, own in scored.items() for metric, value in own.flat().items()}
    return flat, {name: own.counts for name, own in scored.items()}


def test_a_model_that_knows_the_answers_scores_everything(tokenizer):
    found, _ = score(Oracle(tokenizer), tokenizer)
    assert found["retrieval/mean_recall"] == 1.0
    assert found["zero_shot/acc1"] == 1.0
    assert [found[f"composition/{kind}/acc"] for kind in KINDS] == [1.0] * len(KINDS)
    assert found["composition/mean_kind_acc"] == 1.0
    assert found["pointing/pointing_text"] > 0.95  # a repeated mention of one object shares its patch
    assert found["pointing/pointing_words"] > 0.95
    assert found["pointing/pointing_words_any"] >= found["pointing/pointing_words"]
    assert found["pointing/pointing_chance"] < found["pointing/pointing_chance_any"] < 0.5


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    vision = {"image_size": SIZE, "patch_size": 8, "head_width": 16, **tower}
    text = {"context_length": 77, "vocab_size": 49408, "heads": 2, **tower}
    return build(config={"embed_dim": 16, "vision_cfg": vision, "text_cfg": text})


def test_scenes_are_drawn_at_the_towers_size_and_not_resized(tiny):
    scenes = data.test_scenes(5, 0)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    assert torch.equal(scene_images(tiny, scenes), (data.render(scenes, SIZE).float() / 255 - mean) / std)


def test_an_untrained_model_is_about_as_good_as_chance(tiny, tokenizer):
    found, counts = score(tiny, tokenizer, 200)
    assert found["retrieval/text_retrieval_recall@1"] < 0.05
    assert found["composition/mean_kind_acc"] == pytest.approx(0.5, abs=0.15)
    assert counts["retrieval"] == {"images": 200, "captions": 200}
    assert sum(counts["composition"].values()) > 100
    assert counts["zero_shot"]["images"] == counts["pointing"]["images"] == 100


def test_evaluation_repeats_exactly_and_leaves_the_model_as_it_was(tiny, tokenizer):
    tiny.train()
    first = score(tiny, tokenizer, 30, seed=1)
    assert tiny.training
    assert all(parameter.requires_grad for parameter in tiny.parameters())
    assert score(tiny, tokenizer, 30, seed=1) == first
    assert score(tiny, tokenizer, 30, seed=2) != first


def test_retrieval_and_composition_embed_their_images_once(tiny, tokenizer, monkeypatch):
    rows = []
    original = DualEncoder.encode_image
    monkeypatch.setattr(
        DualEncoder, "encode_image", lambda self, images: rows.append(len(images)) or original(self, images)
    )
    score(tiny, tokenizer, 30)
    assert rows == [30, 15]  # the test split, and the zero-shot split


def test_grounding_on_scenes_has_phrases_for_one_object_and_for_several():
    task = scene_grounding(6, 32)
    boxes = [len(several) for several in task.phrases.boxes]
    assert min(boxes) == 1
    assert max(boxes) > 1
    spoken = [
        caption[span.start : span.end] for caption, span in zip(task.phrases.captions, task.phrases.spans, strict=True)
    ]
    assert len(spoken) == len(boxes)
    assert task.caption_of_phrase == task.phrases.image_of_phrase


def test_the_regions_of_sets_are_all_objects_also_those_that_no_phrase_names():
    task = scene_grounding(30, 32)
    scenes = data.scene_batch(range(30), 0, "collective_test")
    named = {image: set() for image in range(30)}
    for image, boxes, objects in zip(
        task.phrases.image_of_phrase, task.phrases.boxes, task.phrases.objects, strict=True
    ):
        assert set(objects) == {thing.box for thing in scenes[image].objects}
        named[image] |= set(boxes)
    assert any(named[image] < {thing.box for thing in scene.objects} for image, scene in enumerate(scenes))
