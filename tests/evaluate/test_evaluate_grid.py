"""Grid pointing on hand-made maps: what finds its own tile has 100, what ignores its phrase 25, whatever it sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from powerclip.data.trees import flat_tree, parse_bracketed
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedded
from powerclip.evaluate.grid import Mosaics, captions_with_trees, make_grid, read_grid, tiles_of_patches
from powerclip.evaluate.images import FileImages
from powerclip.evaluate.metrics import share_inside
from powerclip.evaluate.tasks import CaptionRetrieval
from powerclip.runtime.distributed import SINGLE

GRID = (4, 4)
NOUNS = ("dog", "cup", "boat", "tree", "horse", "car", "ball", "kite", "bench")
COLOURS = [(25 * number, 255 - 25 * number, 120) for number in range(len(NOUNS))]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """One image of its own colour for each noun, and a table of captions; the dog has two captions."""
    folder = tmp_path_factory.mktemp("photos")
    for noun, colour in zip(NOUNS, COLOURS, strict=True):
        Image.new("RGB", (40, 30), colour).save(folder / f"{noun}.png")
    rows = ["image,caption", *(f"{noun}.png,a {noun} on the grass" for noun in NOUNS), "dog.png,the dog"]
    (folder / "photos.csv").write_text("\n".join(rows))
    return folder / "photos.csv"


class KnownFeatures:
    """An embedder whose patches know which image's tile they lie in, and whose phrases know their noun."""

    encoder = SimpleNamespace(grid=GRID)
    ranks = SINGLE

    def __init__(self, query, patches):
        self._query, self._patches = query, patches

    def phrases(self, captions, trees):
        return self.texts(
            [caption[tree.nodes[0].start : tree.nodes[0].end] for caption, tree in zip(captions, trees, strict=True)]
        )

    def texts(self, texts):
        return torch.stack([self._query(text) for text in texts])

    def patches(self, source, use):
        for number in range(len(source.names)):
            use([number], self._patches(source, number)[None])
        return Embedded(torch.zeros(len(source.names), 0), torch.ones(len(source.names), dtype=torch.bool), ())


def gold_patches(source: Mosaics, number: int) -> torch.Tensor:
    return torch.eye(len(NOUNS))[torch.tensor(source.tiles(number))[tiles_of_patches(GRID)]]


def gold_query(text: str) -> torch.Tensor:
    return torch.eye(len(NOUNS))[[text.endswith(noun) for noun in NOUNS].index(True)]


def test_each_image_fills_each_tile_once_with_the_same_neighbours(photos):
    mosaics = read_grid(photos).images
    assert len(mosaics.names) == 8  # nine images: one is left out
    for start in (0, 4):
        shown = [mosaics.tiles(number) for number in range(start, start + 4)]
        assert all(sorted(column) == sorted(shown[0]) for column in zip(*shown, strict=True))
        image = mosaics.decode(mosaics.read(start))
        corners = [image.getpixel((x, y)) for y in (2, 440) for x in (2, 440)]
        assert corners == [COLOURS[tile] for tile in shown[0]]


def test_the_same_seed_gives_the_same_mosaics_and_another_others(photos):
    assert read_grid(photos).images.order == read_grid(photos).images.order
    assert read_grid(photos, seed=1).images.order != read_grid(photos).images.order


def test_phrases_that_could_mean_another_image_of_the_mosaic_are_left_out(photos):
    task = read_grid(photos)
    spoken = {caption[tree.nodes[0].start : tree.nodes[0].end] for caption, tree in task._phrases()}
    assert "the grass" not in spoken
    assert "a boat" in spoken
    assert task.left_out >= 8


def test_a_map_that_finds_its_tile_has_100(photos):
    scored = read_grid(photos).score(KnownFeatures(gold_query, gold_patches)).parts[""]
    assert scored == {name: pytest.approx(0.25 if "chance" in name else 1) for name in scored}


def test_a_map_that_ignores_its_phrase_has_25_whatever_it_sees(photos):
    torch.manual_seed(0)
    liked, query = torch.randn(len(NOUNS), 6), torch.randn(6)

    def salient(source: Mosaics, number: int) -> torch.Tensor:
        noise = torch.randn(16, 6, generator=torch.Generator().manual_seed(number // 4))
        return liked[torch.tensor(source.tiles(number))[tiles_of_patches(GRID)]] + 0.0 * noise

    task = read_grid(photos)
    scored = task.score(KnownFeatures(lambda text: query, salient)).parts[""]
    # The dog has twice as many phrases: it counts as one image all the same.
    assert scored["grid_words"] == pytest.approx(0.25)
    place = torch.randn(16, 6)  # a map that is always the same
    scored = task.score(KnownFeatures(gold_query_of(6), lambda source, number: place)).parts[""]
    assert scored["grid_words"] == pytest.approx(0.25)
    assert scored["grid_text_hit"] == pytest.approx(0.25)


def gold_query_of(width: int):
    return lambda text: torch.randn(width, generator=torch.Generator().manual_seed(len(text)))


def test_the_line_between_tiles_belongs_to_none_and_no_response_is_no_share():
    assert tiles_of_patches((3, 3)).tolist() == [0, -1, 1, -1, -1, -1, 2, -1, 3]
    maps = torch.tensor([[1.0, 3.0, -5.0], [-1.0, -1.0, -1.0], [torch.nan, 1.0, 0.0]])
    assert share_inside(maps, torch.tensor([False, True, False])).tolist() == [0.75, 0, 1]


def test_trees_are_the_parsers_where_there_is_no_sidecar(photos):
    task = read_grid(photos)
    data = CaptionRetrieval(task.images.images, ["a dog on the grass"], torch.tensor([0]))
    assert captions_with_trees(data) == [
        parse_bracketed("(NP (NP (DT a) (NN dog)) (PP (IN on) (NP (DT the) (NN grass))))", "a dog on the grass")
    ]


def test_too_few_images_or_no_phrase_of_its_own_is_an_error(photos, tmp_path):
    images = FileImages([photos.parent / f"{noun}.png" for noun in NOUNS])
    three = CaptionRetrieval(FileImages(images.paths[:3]), ["a dog"] * 3, torch.arange(3))
    with pytest.raises(UserError, match="3 images are too few"):
        make_grid(three, [flat_tree("a dog")] * 3, "here")
    same = CaptionRetrieval(images, ["a dog"] * 9, torch.arange(9))
    tree = parse_bracketed("(NP (DT a) (NN dog))", "a dog")
    with pytest.raises(UserError, match="no caption has a phrase"):
        make_grid(same, [tree] * 9, "here")
    (tmp_path / "class").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "class" / "a.png")
    with pytest.raises(UserError, match="images with captions are expected"):
        read_grid(tmp_path)
