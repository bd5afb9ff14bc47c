"""`powerclip evaluate`: layouts are recognised, results resume, missing and damaged datasets do not stop the rest."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from benchmark_examples import CLASSES, caption_table, class_folders, image, sugarcrepe, tiny_model, winoground
from mini_corpus import write_shard
from rich.console import Console

import powerclip
from powerclip.encoders import DualEncoder
from powerclip.errors import UserError
from powerclip.evaluate import embedder as embedding
from powerclip.evaluate import runner as suite_run
from powerclip.evaluate.command import evaluate_model
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.images import FileImages
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.runner import evaluate, jobs_for_paths, jobs_for_suite, read_records
from powerclip.evaluate.suites import BENCHMARKS, choose
from powerclip.evaluate.tasks import CaptionRetrieval, Classification, LinearProbe


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def webdataset(folder, labels="cls", split="test"):
    """clip-benchmark's layout."""
    members = []
    for number in range(14):
        content = image(folder / "drawn.png", number).read_bytes()
        members.append((f"s{number:04d}.png", content))
        if labels == "cls":
            members.append((f"s{number:04d}.cls", str(number % 7)))
        elif labels == "npy":
            buffer = io.BytesIO()
            np.save(buffer, np.eye(7, dtype=np.int64)[number % 7])
            members.append((f"s{number:04d}.npy", buffer.getvalue()))
        else:
            members.append((f"s{number:04d}.txt", f"a {CLASSES[number % 7]}\nnumber {number}"))
    (folder / split).mkdir(parents=True, exist_ok=True)
    for number in range(2):
        write_shard(folder / split / f"{number}.tar", members[14 * number : 14 * number + 14])
    (folder / "drawn.png").unlink()
    (folder / "classnames.txt").write_text("\n".join(CLASSES))
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\na {c}\n")
    return folder


@pytest.fixture
def encoded(monkeypatch):
    """How many images the image tower has read."""
    counts = []
    original = DualEncoder.encode_image

    def count(self, images):
        counts.append(len(images))
        return original(self, images)

    monkeypatch.setattr(DualEncoder, "encode_image", count)
    return counts


def test_tars_are_recognised_by_what_lies_beside_their_images(tmp_path):
    by_class = read_path(webdataset(tmp_path / "cls"))
    assert isinstance(by_class, Classification)
    assert by_class.labels.tolist() == [number % 7 for number in range(14)]
    assert list(by_class.templates) == ["a photo of a {c}.", "a {c}"]
    several = read_path(webdataset(tmp_path / "npy", "npy"))
    assert several.labels.shape == (14, 7)
    captions = read_path(webdataset(tmp_path / "txt", "txt"))
    assert isinstance(captions, CaptionRetrieval)
    assert captions.captions[2:4] == ["a bear", "number 1"]


def test_a_image_in_a_tar_is_the_image_in_its_file(model, tmp_path):
    task = read_path(webdataset(tmp_path / "wds"))
    files = FileImages([image(tmp_path / "files" / f"{number}.png", number) for number in range(14)])
    embedder = Embedder(*model)
    assert torch.equal(embedder.images(task.images).vectors, embedder.images(files).vectors)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "image,caption\n", "no rows"),
        ("a.csv", "image,caption\ngone.png,a dog\n", r"1 images that are not there.*gone\.png"),
        ("a.csv", "image,caption\ngone.png\n", "line 2"),
        ("a.json", "{", "not a JSON file"),
        ("a.json", '{"0": {"filename": "gone.png", "caption": "a", "negative_caption": "b"}}', "none of the images"),
        ("a.json", '[{"filename": "a.png", "caption": null, "negative_caption": "b"}]', "item 0: kind, caption and"),
        ("a.tar", "no tar", "cannot be read"),
        ("a.txt", "", "not a benchmark"),
        ("folder/x.txt", "", "holds no benchmark"),
        ("folder/examples.jsonl", '{"id": 0}', "line 1"),
        ("folder/examples.jsonl", b"caf\xe9", "not a text in UTF-8"),
    ],
)
def test_data_that_cannot_be_used_is_one_clear_line(name, content, message, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        read_path(path.parent if path.parent.name == "folder" else path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[" * 100_000], ids=["torn", "nested"])
def test_captions_in_a_tar_that_cannot_be_read_are_one_clear_line(tmp_path, content):
    drawn = image(tmp_path / "drawn.png", 0).read_bytes()
    with pytest.raises(UserError, match=r"0\.tar cannot be read") as caught:
        read_path(write_shard(tmp_path / "0.tar", [("a.png", drawn), ("a.json", content)]))
    assert "\n" not in str(caught.value)


def test_class_names_in_another_encoding_are_one_clear_line(tmp_path):
    (class_folders(tmp_path, 1) / "classnames.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match=r"classnames\.txt: not a text in UTF-8"):
        read_path(tmp_path)


def saved(array):
    buffer = io.BytesIO()
    np.save(buffer, np.array(array))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (("cls", "1"), ("cls", "-1"), "b.png: its label must be a class number, from 0 on, got -1"),
        (("cls", "1"), ("npy", saved([0, 1])), "b.png: its label must be a class number"),
        (
            ("npy", saved([0, 1])),
            ("npy", saved([0, 1, 1])),
            r"b.png: its label must be 2 zeros and ones, got \[0, 1, 1\]",
        ),
        (("npy", saved([0, 1])), ("npy", saved([0, 7])), "b.png: its label must be 2 zeros and ones"),
        (("npy", saved([["x"]])), ("cls", "1"), "a.png: its label must be 1 zeros and ones"),
    ],
)
def test_labels_that_do_not_fit_are_named(first, second, message, tmp_path):
    drawn = image(tmp_path / "drawn.png", 0).read_bytes()
    members = [("a.png", drawn), (f"a.{first[0]}", first[1]), ("b.png", drawn), (f"b.{second[0]}", second[1])]
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    with pytest.raises(UserError, match=message):
        read_path(write_shard(tmp_path / "0.tar", members))


def test_half_a_character_in_a_caption_is_embedded_like_any_other(model, tmp_path):
    image(tmp_path / "a.png", 0)
    (tmp_path / "a.json").write_text('[{"filename": "a.png", "caption": "a \\ud83d", "negative_caption": "b"}]')
    assert evaluate(*model, jobs_for_paths([tmp_path / "a.json"]), tmp_path / "out", model="tiny", quiet=True).results


def test_no_dataset_takes_the_place_of_another(tmp_path):
    tables = [caption_table(tmp_path / folder / "val", 2) for folder in "abc"]
    own = [class_folders(tmp_path / "mine" / "cifar10", 1), tmp_path / "mine" / "cifar10"]
    jobs = [*jobs_for_paths([*tables, *own]), *jobs_for_suite(choose("paper", ["cifar10"]), tmp_path)]
    names = [job.name for job in jobs]
    assert names[:4] == ["captions", "val/captions", "c/val/captions", "mine/cifar10"]
    assert names[-1] == "cifar10"  # of the suite: the paper's tables have a column for it
    assert len({job.file for job in jobs}) == len(jobs)


def test_results_have_clip_benchmarks_schema_one_file_for_each_dataset(model, tmp_path):
    paths = [class_folders(tmp_path / "animals", 2), caption_table(tmp_path / "table"), sugarcrepe(tmp_path / "crepe")]
    paths += [tmp_path / "crepe" / "swap_att.json", winoground(tmp_path / "pairs")]
    (tmp_path / "crepe" / "val2017").rename(tmp_path / "crepe" / "images")
    output = tmp_path / "results"
    evaluate(*model, jobs_for_paths(paths), output, model="tiny", quiet=True)
    assert sorted(path.name for path in output.glob("*.json")) == [
        "animals.json",
        "captions.json",
        "crepe.json",
        "pairs.json",
        "swap_att.json",
    ]
    record = json.loads((output / "animals.json").read_text())
    assert {"dataset", "model", "pretrained", "task", "metrics", "language"} <= record.keys()
    assert record["metrics"].keys() == {"acc1", "acc5", "mean_per_class_recall"}
    assert [one["dataset"] for one in read_records(output / "crepe.json")] == ["crepe/replace_obj", "crepe/swap_att"]


def test_embeddings_are_computed_once_for_the_same_images_and_weights(model, encoded, tmp_path):
    folder, output = class_folders(tmp_path / "animals", 2), tmp_path / "results"
    first = evaluate(*model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    total = sum(encoded)
    assert total == len(list(folder.rglob("*.png")))
    again = evaluate(*model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    assert sum(encoded) == total
    assert again.results["animals"][0]["metrics"] == first.results["animals"][0]["metrics"]
    image(folder / "bear" / "0.png", 77)  # another image under the same name
    evaluate(*model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    assert sum(encoded) == 2 * total
    evaluate(*tiny_model(1), jobs_for_paths([folder]), output, model="other", quiet=True)
    assert sum(encoded) == 3 * total


def test_embeddings_that_a_power_cut_tore_are_computed_again(model, encoded, tmp_path):
    folder, output = class_folders(tmp_path / "animals", 2), tmp_path / "results"
    first = evaluate(*model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    total = sum(encoded)
    for number, path in enumerate((output / "embeddings").iterdir()):
        path.write_bytes(path.read_bytes()[: 100 * number])
    again = evaluate(*model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    assert again.results["animals"][0]["metrics"] == first.results["animals"][0]["metrics"]
    assert sum(encoded) == 2 * total


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"dataset": 1, "model": 1, "task": 1, "metrics": {}, "powerclip": null}']
)
def test_a_result_file_that_is_none_is_measured_and_written_again(content, model, tmp_path):
    winoground(tmp_path / "data" / "winoground", 4)
    jobs = jobs_for_suite(choose("composition", ["winoground"]), tmp_path / "data")
    (tmp_path / "winoground.json").write_text(content)
    done = evaluate(*model, jobs, tmp_path, model="tiny", quiet=True)
    assert read_records(tmp_path / "winoground.json") == done.results["winoground"]


def test_a_suite_runs_what_is_there_and_says_where_to_get_the_rest(model, tmp_path, capsys):
    root, output = tmp_path / "data", tmp_path / "results"
    webdataset(root / "wds_food101")
    webdataset(root / "wds_voc2007_multilabel", "npy")
    damaged = webdataset(root / "wds_cars")
    (damaged / "classnames.txt").unlink()
    done = evaluate(*model, jobs_for_suite(choose("classification"), root), output, model="tiny")
    assert list(done.results) == ["food101", "voc2007_multilabel"]
    assert done.results["voc2007_multilabel"][0]["metrics"].keys() == {"mean_average_precision"}
    assert "classnames.txt" in done.failed["cars"]
    assert len(done.missing) == 14
    assert "clip-benchmark/wds_vtab-cifar10" in done.missing["cifar10"]
    assert str(root / "wds_vtab-cifar10") in done.missing["cifar10"]
    assert "cifar10: missing; get it from" in capsys.readouterr().out


def test_an_interrupted_suite_goes_on_where_it_stopped(model, encoded, tmp_path, capsys):
    root, output = tmp_path / "data", tmp_path / "results"
    for name in ("wds_flickr8k", "wds_flickr30k"):
        webdataset(root / name, "txt")
    jobs = jobs_for_suite(choose("retrieval", ["flickr8k", "flickr30k"]), root)
    evaluate(*model, jobs[:1], output, model="tiny")
    shutil.rmtree(output / "embeddings")
    encoded.clear()
    evaluate(*model, jobs, output, model="tiny")
    assert sum(encoded) == 14  # of the second alone
    assert capsys.readouterr().out.count("(finished before)") == 1
    evaluate(*tiny_model(3), jobs, output, model="tiny", quiet=True)
    assert sum(encoded) == 28  # other weights: anew, once for the images that both share


def test_a_linear_probe_reads_both_splits(model, tmp_path):
    webdataset(tmp_path / "wds_vtab-cifar10")
    webdataset(tmp_path / "wds_vtab-cifar10", split="train")
    job = jobs_for_suite(choose("probe", ["cifar10:probe"]), tmp_path)[0]
    assert isinstance(job.find(), LinearProbe)
    done = evaluate(*model, [job], tmp_path / "results", model="tiny", quiet=True)
    assert done.results["cifar10_probe"][0]["metrics"].keys() == {"lp_acc1", "lp_acc5", "lp_mean_per_class_recall"}


# The class subsets of ImageNet-A, -R and -O: first and last name, by the WordNet numbers of their papers.
SUBSETS = {
    "imagenet-a": (["n01498041", "n12267677"], ["stingray", "acorn"]),
    "imagenet-r": (["n01443537", "n12267677"], ["goldfish", "acorn"]),
    "imagenet-o": (["n01443537", "n13052670"], ["goldfish", "hen of the woods mushroom"]),
}


@pytest.mark.parametrize("name", SUBSETS)
def test_imagenet_subsets_have_their_own_classes_and_not_the_thousand(name, model, tmp_path):
    builder = pytest.importorskip("clip_benchmark.datasets.builder", reason="the extra `eval` is not installed")
    ends, names = SUBSETS[name]
    between = [wnid for wnid in builder.all_imagenet_wordnet_ids if ends[0] < wnid < ends[1]][:198]
    for number, wnid in enumerate([ends[0], *between, ends[1]]):
        image(tmp_path / name / wnid / "0.png", number, (8, 8))
    (job,) = jobs_for_suite(choose("robustness", [name]), tmp_path)
    task = job.find()
    assert len(task.classes) == 200
    assert [task.classes[0], task.classes[-1]] == names
    assert task.labels.tolist() == list(range(200))
    assert len(task.templates) == 80
    done = evaluate(*model, [job], tmp_path / "out", model="tiny", quiet=True)
    assert done.results[name][0]["powerclip"]["counts"] == {"images": 200, "classes": 200}


def test_wordnet_numbers_stand_for_imagenets_classes(tmp_path):
    pytest.importorskip("clip_benchmark.datasets.builder", reason="the extra `eval` is not installed")
    for number, wnid in enumerate(("n01440764", "n01443537")):
        image(tmp_path / "folders" / wnid / "0.png", number)
    folders = read_path(tmp_path / "folders")
    assert folders.classes == ["tench", "goldfish"]  # those that are there
    assert len(folders.templates) == 80
    content = (tmp_path / "folders" / "n01443537" / "0.png").read_bytes()
    write_shard(tmp_path / "some.tar", [("n01443537_7.png", content), ("n01443537_7.cls", "1")])
    tar = read_path(tmp_path / "some.tar")
    assert (len(tar.classes), tar.classes[1]) == (1000, "goldfish")
    write_shard(tmp_path / "other.tar", [("n01443537_7.png", content), ("n01443537_7.cls", "5")])
    with pytest.raises(UserError, match=r"classnames\.txt is missing"):  # labelled in another order
        read_path(tmp_path / "other.tar")
    image(tmp_path / "folders" / "n99999999" / "0.png", 3)
    with pytest.raises(UserError, match="n99999999 is no class of ImageNet-1k"):
        read_path(tmp_path / "folders")


def test_the_imagenet_sample_is_classified_among_the_thousand(model, real_data, tmp_path):
    pytest.importorskip("clip_benchmark.datasets.builder", reason="the extra `eval` is not installed")
    task = read_path(real_data / "imagenet-sample" / "imagenet-sample.tar")
    assert (len(task.classes), sorted(task.labels.tolist())) == (1000, list(range(1000)))


def test_a_killed_evaluation_goes_on_at_the_chunk_that_it_was_at(model, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 5)
    folder, output = class_folders(tmp_path / "animals", 2), tmp_path / "results"

    def stop(done, total):
        if done == 10:
            raise KeyboardInterrupt

    for watch in (stop, lambda done, total: None):
        monkeypatch.setattr(suite_run, "watching", lambda *_, watch=watch: nullcontext(watch))
        try:
            evaluate(*model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
        except KeyboardInterrupt:
            assert sum(encoded) == 10
            assert not list(output.glob("*.json"))
    assert sum(encoded) == len(list(folder.rglob("*.png")))
    assert (output / "animals.json").is_file()


def test_a_terminal_shows_how_many_images_are_embedded_and_a_log_does_not(model, tmp_path):
    folder = class_folders(tmp_path / "animals", 2)
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        output = tmp_path / str(terminal)
        evaluate(*model, jobs_for_paths([folder]), output, model="tiny", console=console)
        count = len(list(folder.rglob("*.png")))
        assert (f"{count}/{count}" in console.file.getvalue()) == terminal


def test_original_folders_are_read_as_clip_benchmark_reads_them(model, tmp_path):
    pytest.importorskip("clip_benchmark.datasets.builder", reason="the extra `eval` is not installed")
    lines = ["image,caption"]
    for number in range(12):
        image(tmp_path / "flickr8k" / f"{number}.jpg", number)
        lines += [f"{number}.jpg,a {CLASSES[number % 7]}, view {view}" for view in range(2)]
    (tmp_path / "flickr8k" / "flickr8k_test_karpathy.txt").write_text("\n".join(lines))
    (tmp_path / "flickr30k").mkdir()
    voc = tmp_path / "voc2007_multilabel" / "VOCdevkit" / "VOC2007"
    for folder in ("ImageSets/Main", "Annotations"):
        (voc / folder).mkdir(parents=True)
    (voc / "ImageSets" / "Main" / "aeroplane_test.txt").write_text("000001 -1\n000002 -1\n")
    for name, things in (("000001", ["dog", "person"]), ("000002", ["dog"])):
        image(voc / "JPEGImages" / f"{name}.jpg", int(name))
        box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
        found = "".join(f"<object><name>{thing}</name>{box}</object>" for thing in things)
        (voc / "Annotations" / f"{name}.xml").write_text(f"<annotation>{found}</annotation>")
    names = ["flickr8k", "flickr30k", "voc2007_multilabel"]
    done = evaluate(
        *model, jobs_for_suite(choose("paper", names), tmp_path), tmp_path / "out", model="tiny", quiet=True
    )
    assert done.results["flickr8k"][0]["powerclip"]["counts"] == {"images": 12, "captions": 24}
    assert not done.failed, done.failed
    assert list(done.missing) == ["flickr30k"], done.missing
    assert done.results["voc2007_multilabel"][0]["powerclip"]["counts"] == {"images": 2, "classes": 20}
    assert "does not hold flickr30k_test_karpathy.txt" in done.missing["flickr30k"]


def test_results_are_named_after_the_run_and_not_after_its_folder_of_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("clip/seed-0", "powerclip/seed-0"):
        powerclip.save(tiny_model()[0], tmp_path / run / "model")
        evaluate_model(f"{run}/model", [class_folders(tmp_path / "animals", 1)], device="cpu", quiet=True)
    names = sorted(path.parent.name for path in (tmp_path / "results").glob("*/animals.json"))
    assert names == ["clip-seed-0", "powerclip-seed-0"]
    (record,) = read_records(tmp_path / "results" / "clip-seed-0" / "animals.json")
    assert record["model"] == "clip/seed-0"


def test_the_suites_are_the_papers_28_benchmarks_and_the_linear_probe():
    sizes = {name: len(choose(name)) for name in ("classification", "retrieval", "robustness", "composition", "probe")}
    assert sizes == {"classification": 17, "retrieval": 3, "robustness": 6, "composition": 2, "probe": 3}
    assert choose("paper") == list(BENCHMARKS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say what to evaluate on"),
        ({"suite": "retreival", "data": "."}, "did you mean 'retrieval'"),
        ({"suite": "retrieval"}, "needs --data"),
        ({"suite": "retrieval", "data": ".", "datasets": ["flickr9k"]}, "did you mean"),
        ({"datasets": ["flickr8k"]}, "belong to a suite"),
        ({"paths": ["gone"]}, "no file or folder gone"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(options, message, tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    paths = [Path(path) for path in options.pop("paths", [])]
    if "data" in options:
        options["data"] = Path(options["data"])
    with pytest.raises(UserError, match=message):
        evaluate_model("no-such-model", paths, **options)
