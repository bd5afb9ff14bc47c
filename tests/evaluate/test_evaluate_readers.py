"""A user's own data: layouts are recognised by what lies there, and what cannot be used is one clear line."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
import torch
from benchmark_examples import class_folders, image, tiny_model, webdataset
from mini_corpus import write_shard

from powerclip.cli.process import table_columns
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.images import FileImages
from powerclip.evaluate.readers import read_caption_tars, read_path, read_sugarcrepe
from powerclip.evaluate.tasks import CaptionRetrieval, Classification

# ---- tars ------------------------------------------------------------------------------------------------------------


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


def test_captions_are_read_whatever_else_lies_beside_them(tmp_path):
    drawn = image(tmp_path / "drawn.png", 0).read_bytes()
    members = [("a.png", drawn), ("a.cls", "1"), ("a.json", json.dumps({"captions": ["a cup", "a mug"]}))]
    task = read_caption_tars([write_shard(tmp_path / "0.tar", members)])
    assert (task.captions, task.image_of_caption.tolist()) == (["a cup", "a mug"], [0, 0])
    tars = [tmp_path / "0.tar", write_shard(tmp_path / "1.tar", [("b.png", drawn), ("b.cls", "1")])]
    with pytest.raises(UserError, match=r"1\.tar: b\.png: every image needs captions"):
        read_caption_tars(tars)


def test_a_tar_that_was_cut_off_is_an_error(tmp_path):
    folder = webdataset(tmp_path / "wds", "txt")
    whole = (folder / "test" / "0.tar").read_bytes()
    for size in (len(whole) // 2, 512, 0):
        (folder / "test" / "0.tar").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"0\.tar cannot be read: (cut off|empty file); copy it again"):
            read_path(folder)


def test_an_image_in_a_tar_is_the_image_in_its_file(tmp_path):
    task = read_path(webdataset(tmp_path / "wds"))
    files = FileImages([image(tmp_path / "files" / f"{number}.png", number) for number in range(14)])
    embedder = Embedder(*tiny_model())
    assert torch.equal(embedder.images(task.images).vectors, embedder.images(files).vectors)


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_further_columns_of_a_table_are_no_captions(tmp_path):
    for name in ("a.png", "b.png"):
        image(tmp_path / name, 0)
    (tmp_path / "t.csv").write_text("image,caption,split,license\na.png,a cup,val,CC0\nb.png,a mug,val,CC0\n")
    task = read_path(tmp_path / "t.csv")
    assert (task.captions, task.image_of_caption.tolist()) == (["a cup", "a mug"], [0, 1])
    assert task.summary == "2 images, 2 captions; image: image, captions: caption (guessed)"


def test_a_table_without_heads_keeps_its_first_row(tmp_path):
    for name in ("a.png", "b.png"):
        image(tmp_path / name, 0)
    (tmp_path / "t.csv").write_text("a.png,a cup\nb.png,a mug\n")
    assert read_path(tmp_path / "t.csv").captions == ["a cup", "a mug"]


def test_a_folder_of_images_with_their_texts_is_retrieval(tmp_path):
    for name, text in (("a", "a cup\na mug\n"), ("b", "a plate")):
        image(tmp_path / "photos" / f"{name}.png", 0)
        (tmp_path / "photos" / f"{name}.txt").write_text(text)
    task = read_path(tmp_path / "photos")
    assert isinstance(task, CaptionRetrieval)
    assert (task.captions, task.image_of_caption.tolist()) == (["a cup", "a mug", "a plate"], [0, 0, 1])


def test_a_table_whose_images_are_missing_is_no_dataset(tmp_path):
    image(tmp_path / "a.png", 0)
    (tmp_path / "t.csv").write_text("image,caption\na.png,a cup\ngone.png,a mug\n")
    with pytest.raises(UserError, match=r"1 of 2 images are not there, the first .*gone\.png: more than 0\.1 %"):
        read_path(tmp_path / "t.csv")


def test_columns_that_the_command_names_are_read(tmp_path):
    image(tmp_path / "a.png", 0)
    (tmp_path / "t.csv").write_text("photo,title,text\na.png,a cup,a mug\n")
    with pytest.raises(UserError, match=r"--image-column"):
        read_path(tmp_path / "t.csv", columns=table_columns("", ["text"]))
    assert read_path(tmp_path / "t.csv", columns=table_columns("photo", ["text"])).captions == ["a mug"]


# ---- what cannot be used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "image,caption\n", "no rows"),
        ("a.csv", "image,caption\ngone.png,a dog\n", r"no row can be used; 1 left out: image not there .*gone\.png"),
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


# ---- ImageNet's classes ----------------------------------------------------------------------------------------------


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


def test_the_imagenet_sample_is_classified_among_the_thousand(real_data):
    pytest.importorskip("clip_benchmark.datasets.builder", reason="the extra `eval` is not installed")
    task = read_path(real_data / "imagenet-sample" / "imagenet-sample.tar")
    assert (len(task.classes), sorted(task.labels.tolist())) == (1000, list(range(1000)))


# ---- SugarCrepe ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(mini_corpus, tmp_path):
    return shutil.copytree(mini_corpus / "sugarcrepe", tmp_path / "sugarcrepe")


def test_items_are_read_in_order_and_those_without_an_image_counted(folder):
    task = read_path(folder)
    names = [task.images.paths[number].name for number in task.image_of_item]
    assert list(zip(task.kinds, names, strict=True)) == [
        ("replace_att", "red.png"),
        ("replace_att", "blue.png"),
        ("swap_obj", "red.png"),
    ]
    assert task.negatives[0] == "a blue square"
    assert task.missing == 1
    assert task.summary == "3 comparisons, 1 left out: their images are not there"


def test_sugarcrepes_images_may_lie_in_cocos_folder_and_must_lie_in_one(folder):
    (folder / "images").rename(folder / "val2017")
    assert read_sugarcrepe(folder).missing == 1
    (folder / "val2017").rename(folder / "elsewhere")
    with pytest.raises(UserError, match="images holds none of the images"):
        read_sugarcrepe(folder)


@pytest.mark.parametrize("content", ["{", "[1, 2]", '{"0": {"filename": "red.png"}}', "3"])
def test_a_damaged_file_is_named(folder, content):
    (folder / "add_obj.json").write_text(content)
    with pytest.raises(UserError, match=r"add_obj\.json"):
        read_sugarcrepe(folder)


def test_a_folder_without_its_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="none of SugarCrepe's files"):
        read_sugarcrepe(tmp_path)


def test_the_published_items_whose_images_are_there_are_all_compared(real_data):
    task = read_sugarcrepe(real_data / "sugarcrepe")
    files = sorted((real_data / "sugarcrepe").glob("*.json"))
    listed = {path.stem: len(json.loads(path.read_text())) for path in files}
    assert len(task.captions) + task.missing == sum(listed.values())
    scored = task.score(Embedder(*tiny_model()))
    missing = scored.counts.pop("missing", 0)
    assert missing or scored.counts == listed
    assert 0.3 < scored.flat()["acc"] < 0.7  # untrained: near chance
