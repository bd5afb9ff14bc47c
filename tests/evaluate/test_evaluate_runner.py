"""`powerclip evaluate`: layouts are recognised, results resume, missing and damaged datasets do not stop the rest."""

from __future__ import annotations

import io
import json
import shutil

import pytest
from benchmark_examples import (
    CLASSES,
    caption_table,
    class_folders,
    image,
    sugarcrepe,
    tiny_model,
    webdataset,
    winoground,
)
from rich.console import Console

import powerclip
from powerclip.encoders import DualEncoder
from powerclip.errors import UserError
from powerclip.evaluate import embedder as embedding
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.pair_scores import ScoreSettings
from powerclip.evaluate.paper_tables import build_tables, collect
from powerclip.evaluate.runner import evaluate, evaluate_model, jobs_for_paths, jobs_for_suite, read_records
from powerclip.evaluate.suites import BENCHMARKS, choose
from powerclip.evaluate.tasks import LinearProbe
from powerclip.runtime.progress import Progress


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def measure(towers, jobs, output, **options):
    """Evaluate as the command does, with embeddings kept beside the results."""
    return evaluate(Embedder(*towers, output / "embeddings"), jobs, output, **options)


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


def test_half_a_character_in_a_caption_is_embedded_like_any_other(model, tmp_path):
    image(tmp_path / "a.png", 0)
    (tmp_path / "a.json").write_text('[{"filename": "a.png", "caption": "a \\ud83d", "negative_caption": "b"}]')
    assert measure(model, jobs_for_paths([tmp_path / "a.json"]), tmp_path / "out", model="tiny", quiet=True).results


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
    measure(model, jobs_for_paths(paths), output, model="tiny", quiet=True)
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
    records = {one["dataset"]: one["metrics"] for one in read_records(output / "crepe.json")}
    assert list(records) == ["crepe", "crepe/replace_obj", "crepe/swap_att"]
    assert records["crepe"].keys() == {
        "acc",
        "mean_kind_acc",
        "acc_standard_error",
        "mean_image_acc",
        "centred_acc",
    }


def test_embeddings_are_computed_once_for_the_same_images_and_weights(model, encoded, tmp_path):
    folder, output = class_folders(tmp_path / "animals", 2), tmp_path / "results"
    first = measure(model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    total = sum(encoded)
    assert total == len(list(folder.rglob("*.png")))
    again = measure(model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    assert sum(encoded) == total
    assert again.results["animals"][0]["metrics"] == first.results["animals"][0]["metrics"]
    image(folder / "bear" / "0.png", 77)  # another image under the same name
    measure(model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    assert sum(encoded) == 2 * total
    measure(tiny_model(1), jobs_for_paths([folder]), output, model="other", quiet=True)
    assert sum(encoded) == 3 * total


def test_embeddings_that_a_power_cut_tore_are_computed_again(model, encoded, tmp_path):
    folder, output = class_folders(tmp_path / "animals", 2), tmp_path / "results"
    first = measure(model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    total = sum(encoded)
    for number, path in enumerate((output / "embeddings").iterdir()):
        path.write_bytes(path.read_bytes()[: 100 * number])
    again = measure(model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
    assert again.results["animals"][0]["metrics"] == first.results["animals"][0]["metrics"]
    assert sum(encoded) == 2 * total


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"dataset": 1, "model": 1, "task": 1, "metrics": {}, "powerclip": null}']
)
def test_a_result_file_that_is_none_is_measured_and_written_again(content, model, tmp_path):
    winoground(tmp_path / "data" / "winoground", 4)
    jobs = jobs_for_suite(choose("composition", ["winoground"]), tmp_path / "data")
    (tmp_path / "winoground.json").write_text(content)
    done = measure(model, jobs, tmp_path, model="tiny", quiet=True)
    assert read_records(tmp_path / "winoground.json") == done.results["winoground"]


def test_a_suite_runs_what_is_there_and_says_where_to_get_the_rest(model, tmp_path, capsys):
    root, output = tmp_path / "data", tmp_path / "results"
    webdataset(root / "wds_food101")
    webdataset(root / "wds_voc2007")
    damaged = webdataset(root / "wds_cars")
    (damaged / "classnames.txt").unlink()
    done = measure(model, jobs_for_suite(choose("classification"), root), output, model="tiny")
    assert list(done.results) == ["food101", "voc2007"]
    assert "acc1" in done.results["voc2007"][0]["metrics"]
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
    measure(model, jobs[:1], output, model="tiny")
    shutil.rmtree(output / "embeddings")
    encoded.clear()
    measure(model, jobs, output, model="tiny")
    assert sum(encoded) == 14  # of the second alone
    assert capsys.readouterr().out.count("(finished before)") == 1
    measure(tiny_model(3), jobs, output, model="tiny", quiet=True)
    assert sum(encoded) == 28  # other weights: anew, once for the images that both share


def test_a_linear_probe_reads_both_splits(model, tmp_path):
    webdataset(tmp_path / "wds_vtab-cifar10")
    webdataset(tmp_path / "wds_vtab-cifar10", split="train")
    job = jobs_for_suite(choose("probe", ["cifar10:probe"]), tmp_path)[0]
    assert isinstance(job.find(), LinearProbe)
    done = measure(model, [job], tmp_path / "results", model="tiny", quiet=True)
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
    done = measure(model, [job], tmp_path / "out", model="tiny", quiet=True)
    assert done.results[name][0]["powerclip"]["counts"] == {"images": 200, "classes": 200}


def test_a_killed_evaluation_goes_on_at_the_chunk_that_it_was_at(model, encoded, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 5)
    folder, output = class_folders(tmp_path / "animals", 2), tmp_path / "results"

    def stop(self, done, *, total):
        if done == 10:
            raise KeyboardInterrupt

    for update in (stop, lambda self, done, *, total: None):
        monkeypatch.setattr(Progress, "update", update)
        try:
            measure(model, jobs_for_paths([folder]), output, model="tiny", quiet=True)
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
        measure(model, jobs_for_paths([folder]), output, model="tiny", console=console)
        count = len(list(folder.rglob("*.png")))
        assert (f"{count}/{count}" in console.file.getvalue()) == terminal


def test_voc_with_all_objects_of_an_image_is_a_benchmark_of_its_own(model, tmp_path):
    webdataset(tmp_path / "data" / "wds_voc2007_multilabel", "npy")
    jobs = jobs_for_suite(choose("multilabel"), tmp_path / "data")
    done = measure(model, jobs, tmp_path / "results", model="tiny", quiet=True)
    assert done.results["voc2007_multilabel"][0]["metrics"].keys() == {"mean_average_precision"}
    tables = build_tables(collect([tmp_path / "results" / "voc2007_multilabel.json"]), with_published=False)
    assert [table.key for table in tables] == ["own"]  # beside the paper's top-1 it would be another number


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
    benchmarks = [*choose("paper", ["flickr8k", "flickr30k"]), *choose("multilabel")]
    done = measure(model, jobs_for_suite(benchmarks, tmp_path), tmp_path / "out", model="tiny", quiet=True)
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


def test_results_by_parts_stand_beside_the_global_ones_and_say_what_they_are(tmp_path, capsys):
    powerclip.save(tiny_model()[0], tmp_path / "model")
    table, root = caption_table(tmp_path / "mine", 6), tmp_path / "root"
    webdataset(root / "wds_food101")
    for score in (None, ScoreSettings("late"), ScoreSettings("powerset", rerank=4, boxes=3)):
        for _ in range(2):
            evaluate_model(
                str(tmp_path / "model"), [table], suite="classification", data=root, datasets=["food101"],
                output=tmp_path / "out", device="cpu", score=score
            )  # fmt: skip
    names = {path.name for path in (tmp_path / "out").glob("*.json")}
    scores = ("", ".late", ".powerset-of-the-4-best")
    assert names == {f"{name}{score}.json" for name in ("captions", "food101") for score in scores}
    printed = capsys.readouterr().out
    assert "captions, powerset of the 4 best: image R@1" in printed
    assert printed.count("food101, late: acc1") == 2
    assert printed.count("(finished before)") == 3
    record = read_records(tmp_path / "out" / "captions.powerset-of-the-4-best.json")[0]
    assert record["powerclip"]["score"] == {
        "name": "powerset of the 4 best", "alignment": {}, "nodes": "phrases", "regions": 3, "largest": 1.0, "seed": 0
    }  # fmt: skip
    assert "score" not in read_records(tmp_path / "out" / "captions.json")[0]["powerclip"]
    rows = [method.name for method in build_tables(collect([tmp_path / "out"]), with_published=False)[0].methods]
    model = f"{tmp_path.parent.name}/{tmp_path.name}"
    assert rows == [model, f"{model}, late", f"{model}, powerset of the 4 best"]


def test_the_suites_are_the_papers_28_benchmarks_and_the_linear_probe():
    sizes = {name: len(choose(name)) for name in ("classification", "retrieval", "robustness", "composition", "probe")}
    assert sizes == {"classification": 17, "retrieval": 3, "robustness": 6, "composition": 2, "probe": 3}
    assert choose("paper") == [benchmark for benchmark in BENCHMARKS if benchmark.suite != "multilabel"]
    assert sum(sizes.values()) == len(choose("paper")) == 28 + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say what to evaluate on"),
        ({"suite": "retreival", "data": "."}, "did you mean 'retrieval'"),
        ({"suite": "retrieval"}, "needs --data"),
        ({"suite": "retrieval", "data": ".", "datasets": ["flickr9k"]}, "did you mean"),
        ({"datasets": ["flickr8k"]}, "belong to a suite"),
        ({"paths": ["gone"]}, "no file or folder gone"),
        ({"grounding": ["gone.jsonl"]}, "--grounding needs --images"),
        ({"grounding": ["gone.jsonl"], "images": ["."]}, "--grounding: there is no file gone.jsonl"),
        ({"grounding": ["gone.jsonl"], "images": ["gone.tar"]}, "--images: there is no file or folder gone.tar"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(options, message, tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    paths = [Path(path) for path in options.pop("paths", [])]
    if "data" in options:
        options["data"] = Path(options["data"])
    options |= {name: [Path(path) for path in options[name]] for name in ("grounding", "images") if name in options}
    with pytest.raises(UserError, match=message):
        evaluate_model("no-such-model", paths, **options)
