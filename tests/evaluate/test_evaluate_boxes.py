"""The pointing game on a user's own boxes: the scenes' own numbers from files, and clear words for what is wrong."""

from __future__ import annotations

import json

import pytest
from benchmark_examples import image, tiny_model
from PIL import Image

from powerclip.data import scenes as data
from powerclip.errors import UserError
from powerclip.evaluate.boxes import read_boxes
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.paper_tables import build_tables
from powerclip.evaluate.runner import evaluate, evaluate_model, jobs_for_paths
from powerclip.evaluate.scenes import scene_tasks

CAPTION = "a dog sitting on a red chair"


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def write(folder, items):
    image(folder / "dog.png", 0, (40, 20))
    path = folder / "boxes.json"
    path.write_text(json.dumps(items))
    return path


def item(**changes):
    return {"image": "dog.png", "caption": CAPTION, "phrase": "a red chair", "box": [4, 2, 20, 10], **changes}


def test_the_scenes_as_files_give_the_scenes_own_accuracy(model, tmp_path):
    encoder, tokenizer = model
    scenes = data.test_scenes(20, 0)[:10]
    items = []
    for number, (scene, pixels) in enumerate(zip(scenes, data.render(scenes, encoder.image_size[0]), strict=True)):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
        for span, box in scene.phrase_boxes:
            asked = {"image": f"{number}.png", "caption": scene.caption, "phrase": [span.start, span.end], "box": box}
            items.append(asked)
    path = tmp_path / "boxes.json"
    path.write_text(json.dumps({"units": "shares", "items": items}))
    embedder = Embedder(encoder, tokenizer)
    found = read_boxes(path).score(embedder).flat()
    expected = scene_tasks(20, encoder.image_size[0])["pointing"].score(embedder)
    assert expected.counts["phrases"] == len(items)
    assert found == {name: value for name, value in expected.flat().items() if not name.endswith("_any")}


def test_pixels_and_shares_name_the_same_box(tmp_path):
    in_pixels = read_boxes(write(tmp_path, [item()]))
    in_shares = read_boxes(write(tmp_path, {"units": "shares", "items": [item(box=[0.1, 0.1, 0.5, 0.5])]}))
    assert in_pixels.boxes == [[(0.1, 0.1, 0.5, 0.5)]] == in_shares.boxes
    assert in_pixels.spans[0].start == CAPTION.index("a red chair")


def test_a_phrase_that_names_several_things_may_hit_any_of_them(model, tmp_path):
    encoder, tokenizer = model
    whole, left = [0, 0, 40, 20], [0, 0, 20, 20]
    embedder = Embedder(encoder, tokenizer)
    sure = read_boxes(write(tmp_path, [item(box=whole)])).score(embedder).parts[""]
    assert (sure["pointing_words"], sure["pointing_text"], sure["pointing_chance"]) == (1, 1, 1)
    one = read_boxes(write(tmp_path, [item(box=left)])).score(embedder).parts[""]
    two = [item(box=left), item(box=[20, 0, 40, 20])]
    both = read_boxes(write(tmp_path, two)).score(embedder).parts[""]
    assert both["pointing_words"] == 0.5  # the strongest patch lies in one half
    del two[0]["box"]
    either = read_boxes(write(tmp_path, [two[0] | {"boxes": [left, [20, 0, 40, 20]]}])).score(embedder).parts[""]
    assert either["pointing_words"] == 1
    assert one["pointing_chance"] == 0.5


def test_a_box_between_the_centres_of_patches_is_counted_as_out_of_reach(model, tmp_path, capsys):
    path = write(tmp_path, [item(box=[0, 0, 1, 1]), item()])
    done = evaluate(Embedder(*model), jobs_for_paths([], [path]), tmp_path / "out", model="tiny")
    assert done.results["boxes"][0]["powerclip"]["counts"] == {"images": 1, "phrases": 2, "too small": 1}
    assert "1 of 2 boxes lie between the centres of patches" in capsys.readouterr().out


def test_the_result_stands_beside_the_others_and_in_no_table_of_the_paper(model, tmp_path):
    done = evaluate(
        Embedder(*model), jobs_for_paths([], [write(tmp_path, [item()])]), tmp_path / "out", model="t", quiet=True
    )
    (record,) = done.results["boxes"]
    assert record["task"] == "pointing_game"
    assert record["metrics"].keys() == {"pointing_words", "pointing_text", "pointing_chance"}
    assert [table.key for table in build_tables([record])] == ["own"]


def test_a_damaged_image_is_counted_and_too_many_fail_the_file(model, tmp_path):
    items = [item(image=f"{number}.png") for number in range(2)]
    path = write(tmp_path, items)
    image(tmp_path / "0.png", 0)
    (tmp_path / "1.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"1 of 2 images cannot be read.*1\.png"):
        read_boxes(path).score(Embedder(*model))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "expected a list of items"),
        ({"units": "pixel", "items": [item()]}, "did you mean 'pixels'"),
        (["dog"], "item 0: expected image, caption"),
        ([item(), item(bbox=[1, 2, 3, 4])], "item 1: unknown key 'bbox' (did you mean 'box'?)"),
        ([item(caption=None)], "'caption' is missing"),
        ([item(phrase="a blue chair")], "'a blue chair' is not in the caption"),
        ([item(phrase="a ")], "occurs more than once"),
        ([item(phrase=[3, 90])], "holds no word"),
        ([item(phrase=[1, 2])], "holds no word"),
        ([item(caption="a dog!", phrase="!")], "holds no word"),
        ([item(phrase=None)], "'phrase' must be its text"),
        ([item(box=[1, 2, 3])], "left, top, right and bottom"),
        ([item(box=[1, 2, 10**400, 4])], "left, top, right and bottom"),
        ([item(box=[20, 10, 5, 5])], "not a width and a height"),
        ([item(box=[50, 2, 60, 9])], "outside its image of 40 × 20 pixels"),
        ([item(boxes=[[1, 2, 3, 4]])], "give 'box', or 'boxes'"),
        ([{key: value for key, value in item(boxes=[]).items() if key != "box"}], "at least one box"),
        ([item(image="cat.png")], "1 images that are not there, the first is"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_the_item(items, message, tmp_path):
    with pytest.raises(UserError) as caught:
        read_boxes(write(tmp_path, items))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_phrase_is_found_where_it_stands_whatever_its_capitals(tmp_path):
    # A capital dotted i has a lower case of two characters.
    (span,) = read_boxes(write(tmp_path, [item(caption="İİ A Dog here", phrase="a dog")])).spans
    assert (span.start, span.end) == (3, 8)


def test_a_file_that_is_not_there_or_no_json_is_said_so(tmp_path):
    with pytest.raises(UserError, match="--pointing: there is no file"):
        evaluate_model("no-such-model", [], pointing=[tmp_path / "gone.json"])
    (tmp_path / "boxes.json").write_text("{")
    with pytest.raises(UserError, match="not a JSON file"):
        read_boxes(tmp_path / "boxes.json")
