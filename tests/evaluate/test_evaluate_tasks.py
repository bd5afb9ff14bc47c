"""Metrics: those of clip-benchmark's own evaluators, number for number, and what a damaged image does to them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from benchmark_examples import CLASSES, caption_table, class_folders, image, sugarcrepe, tiny_model, winoground
from PIL import Image
from torch.utils.data import DataLoader

from powerclip.encoders import preprocess_for
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.images import FileImages
from powerclip.evaluate.probe import ProbeSettings, batches, train_probe
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.tasks import (
    CaptionPairs,
    Classification,
    HardNegatives,
    LinearProbe,
)

TEMPLATES = ["a photo of a {c}.", "a drawing of the {c}", "{c}"]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def embedder(model):
    return Embedder(*model)


class Listed(torch.utils.data.Dataset):
    """Images and answers as clip-benchmark's evaluators expect them."""

    def __init__(self, encoder, paths, answers, classes=None):
        self.prepare, self.images, self.answers, self.classes = preprocess_for(encoder), paths, answers, classes

    def __len__(self):
        return len(self.answers)

    def __getitem__(self, place):
        found = self.images[place]
        if isinstance(found, list):
            return torch.stack([self.load(one) for one in found]), self.answers[place]
        return self.load(found), self.answers[place]

    def load(self, path):
        with Image.open(path) as opened:
            return self.prepare(opened.convert("RGB"))


def loader(dataset, texts=False):
    from clip_benchmark.datasets.builder import image_captions_collate_fn

    return DataLoader(dataset, batch_size=16, collate_fn=image_captions_collate_fn if texts else None)


def theirs(name):
    return pytest.importorskip(f"clip_benchmark.metrics.{name}", reason="the extra `eval` is not installed")


def tokenize(model):
    tokenizer = model[1]
    return lambda texts: tokenizer.pad([tokenizer.encode(text).ids for text in texts], full=True)


def top_shares(output, target, topk=(1,)):
    """clip-benchmark's `accuracy`, less the conversion by which it fails under NumPy 2.4."""
    hits = output.topk(max(topk), 1, True, True)[1].eq(target[:, None])
    return [hits[:, :k].any(1).double().mean().item() for k in topk]


def test_zero_shot_accuracy_is_clip_benchmarks(model, embedder, tmp_path, monkeypatch):
    reference = theirs("zeroshot_classification")
    monkeypatch.setattr(reference, "accuracy", top_shares)
    found = read_path(class_folders(tmp_path))
    task = Classification(found.images, found.labels, CLASSES, TEMPLATES)
    data = loader(Listed(model[0], found.images.paths, found.labels.tolist(), CLASSES))
    expected = reference.evaluate(model[0], data, tokenize(model), CLASSES, TEMPLATES, "cpu", amp=False)
    ours = task.score(embedder).parts[""]
    assert ours == pytest.approx(expected)
    assert 0 < ours["acc1"] < ours["acc5"] < 1


def test_with_several_labels_it_is_clip_benchmarks_mean_average_precision(model, embedder, tmp_path):
    reference = theirs("zeroshot_classification")
    found = read_path(class_folders(tmp_path))
    labels = torch.rand(len(found.labels), 7, generator=torch.Generator().manual_seed(0)).gt(0.7).long()
    labels[:, 3] = 0  # a class without any image
    data = loader(Listed(model[0], found.images.paths, list(labels), CLASSES))
    expected = reference.evaluate(model[0], data, tokenize(model), CLASSES, TEMPLATES, "cpu", amp=False)
    ours = Classification(found.images, labels, CLASSES, TEMPLATES).score(embedder).parts[""]
    assert ours == pytest.approx(expected)


def test_fewer_than_five_classes_have_no_top_five(embedder, tmp_path):
    metrics = read_path(class_folders(tmp_path, classes=CLASSES[:3])).score(embedder).parts[""]
    assert metrics["acc5"] is None
    assert metrics["acc1"] is not None


def test_retrieval_is_clip_benchmarks(model, embedder, tmp_path):
    reference = theirs("zeroshot_retrieval")
    task = read_path(caption_table(tmp_path))
    answers = [[] for _ in task.images.paths]
    for caption, owner in zip(task.captions, task.image_of_caption.tolist(), strict=True):
        answers[owner].append(caption)
    data = loader(Listed(model[0], task.images.paths, answers), texts=True)
    expected = reference.evaluate(model[0], data, tokenize(model), "cpu", amp=False, recall_k_list=[1, 5, 10])
    ours = task.score(embedder).parts[""]
    assert ours.pop("mean_recall") == pytest.approx(sum(expected.values()) / 6)
    assert ours == pytest.approx(expected)


def test_on_flickr8k_retrieval_is_clip_benchmarks(model, embedder, real_data):
    reference = theirs("zeroshot_retrieval")
    task = read_path(real_data / "captions10k" / "test-000.tar")
    prepare, answers = preprocess_for(model[0]), [[] for _ in task.images.members]
    for caption, owner in zip(task.captions, task.image_of_caption.tolist(), strict=True):
        answers[owner].append(caption)
    assert (len(answers), len(task.captions)) == (1000, 5000)
    pixels = [prepare(task.images.decode(task.images.read(place))) for place in range(1000)]
    data = loader(list(zip(pixels, answers, strict=True)), texts=True)
    expected = reference.evaluate(model[0], data, tokenize(model), "cpu", amp=False, recall_k_list=[1, 5, 10])
    ours = task.score(embedder).parts[""]
    del ours["mean_recall"]
    assert ours == pytest.approx(expected)


def test_winoground_is_clip_benchmarks(model, embedder, tmp_path):
    reference = theirs("image_caption_selection")
    task = read_path(winoground(tmp_path))
    assert isinstance(task, CaptionPairs)
    paths, captions = task.images.paths, task.captions
    pairs = [list(paths[at : at + 2]) for at in range(0, len(paths), 2)]
    texts = [captions[at : at + 2] for at in range(0, len(captions), 2)]
    data = loader(Listed(model[0], pairs, texts), texts=True)
    expected = reference.evaluate(model[0], data, tokenize(model), "cpu", amp=False)
    assert task.score(embedder).parts[""] == pytest.approx(expected)


def test_sugarcrepe_is_clip_benchmarks_kind_by_kind(model, embedder, tmp_path):
    reference = theirs("image_caption_selection")
    task = read_path(sugarcrepe(tmp_path))
    assert isinstance(task, HardNegatives)
    found = task.score(embedder).parts
    assert list(found) == ["", "replace_obj", "swap_att"]
    whole = found.pop("")
    mean = sum(one["acc"] for one in found.values()) / 2  # there are 24 of each kind
    assert (whole["acc"], whole["mean_kind_acc"]) == pytest.approx((mean, mean))
    for kind, ours in found.items():
        own = [place for place, name in enumerate(task.kinds) if name == kind]
        paths = [[task.images.paths[task.image_of_item[place]]] for place in own]
        texts = [[task.captions[place], task.negatives[place]] for place in own]
        data = loader(Listed(model[0], paths, texts), texts=True)
        assert 0 <= ours.pop("mean_image_acc") <= 1  # theirs has none
        assert ours == pytest.approx(reference.evaluate(model[0], data, tokenize(model), "cpu", amp=False))
        assert 0 < ours["acc"] < 1


def test_the_linear_probe_learns_clip_benchmarks_weights(monkeypatch):
    reference = theirs("linear_probe")
    generator = torch.Generator().manual_seed(1)
    features, labels = torch.randn(50, 8, generator=generator), torch.arange(50) % 3
    settings = ProbeSettings(epochs=3, batch_size=16, seed=5)

    class SameOrder:  # the batches that ours draws, for their loop
        def __init__(self):
            self.generator = torch.Generator().manual_seed(settings.seed)

        def __len__(self):
            return 4

        def __iter__(self):
            return ((features[own], labels[own]) for own in batches(50, 16, self.generator))

    # Theirs insists on a GPU; the arithmetic does not.
    for kind in (torch.nn.Module, torch.Tensor):
        monkeypatch.setattr(kind, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.nn, "DataParallel", lambda model, device_ids: model)
    run = partial(reference.train, SameOrder(), 8, 3, 0, settings.lr, settings.epochs, False, "cpu", settings.seed)
    expected = run()
    ours = train_probe(features, labels, 3, settings)
    torch.testing.assert_close(ours.weight, expected.weight)
    torch.testing.assert_close(ours.bias, expected.bias)


def test_a_linear_probe_learns_its_training_images(embedder, tmp_path):
    train, test = (read_path(class_folders(tmp_path / name, 4, CLASSES[:2])) for name in ("train", "test"))
    found = LinearProbe(train, test, ProbeSettings(epochs=300)).score(embedder)
    assert found.parts[""]["lp_acc1"] == 1.0  # nine images in sixteen dimensions, the same in both sets
    assert found.counts["trained on"] == len(train.labels)


def test_one_damaged_image_in_a_thousand_is_left_out_and_named(embedder, tmp_path):
    good = [image(tmp_path / f"{number}.png", number) for number in range(4)]
    bad = tmp_path / "bad.png"
    bad.write_bytes(good[0].read_bytes()[:60])
    paths = [good[place % 4] for place in range(999)] + [bad]
    labels = torch.tensor([place % 4 for place in range(999)] + [0])
    found = Classification(FileImages(paths), labels, CLASSES[:4], TEMPLATES).score(embedder)
    assert found.corrupt == (str(bad),)
    assert found.counts["images"] == 999


def test_more_damaged_images_fail_the_dataset_by_name(embedder, tmp_path):
    folder = class_folders(tmp_path)
    (folder / "bear" / "1.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"1 of \d+ images cannot be read.*bear/1\.png"):
        read_path(folder).score(embedder)


def test_more_labels_than_class_names_are_refused(embedder, tmp_path):
    task = read_path(class_folders(tmp_path))
    with pytest.raises(UserError, match="7 classes, but 2 class names"):
        Classification(task.images, task.labels, CLASSES[:2], TEMPLATES).score(embedder)
