"""From a recipe to batches: scenes or a corpus, read once, and what is missing is said in the recipe's words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_run import tiny

from powerclip.annotate.parsers import load_parser
from powerclip.annotate.tree_annotator import TreeAnnotator
from powerclip.data.corpus_loader import CorpusLoader
from powerclip.data.scene_loader import SceneLoader
from powerclip.errors import UserError
from powerclip.train.data import kept_size, make_loader
from powerclip.train.data_cache import DataCache
from powerclip.train.inputs import check_inputs
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.results import read_results
from powerclip.train.state import start


def corpus_settings(folder: Path) -> list[str]:
    return [
        "data.source=corpus",
        f"data.shards={folder}/train-*.tar",
        f"data.trees={folder}/trees.tsv",
        f"evaluation.retrieval={folder}/val-000.tar",
        f"evaluation.composition={folder}/sugarcrepe",
        "train.steps=4",
    ]


def test_a_recipe_says_which_loader_makes_its_batches(tmp_path, mini_corpus):
    recipe = tiny(tmp_path)
    encoder = start(recipe).encoder
    assert isinstance(make_loader(recipe, encoder), SceneLoader)
    loader = make_loader(tiny(tmp_path, *corpus_settings(mini_corpus), "data.crop=0.7", "data.seed=3"), encoder)
    assert isinstance(loader, CorpusLoader)
    assert (loader.spec.crop, loader.spec.seed, loader.spec.augment_seed, loader.spec.regions) == (0.7, 3, 0, 3)
    assert loader.batch(0).images.shape == (4, 3, 16, 16)
    assert loader.corpus.images.shape[-1] == kept_size((16, 16)) == 18


def test_a_vocabulary_that_the_tokenizer_exceeds_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"text_cfg\.vocab_size is 100, but the tokenizer has 49408 tokens"):
        train(tiny(tmp_path, "model.config.text_cfg.vocab_size=100"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_scenes_for_a_model_whose_images_are_not_square_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"data\.source: scenes are square, .* 32×48 pixels"):
        train(tiny(tmp_path, "model.config.vision_cfg.image_size=[32, 48]"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_compiled_towers_see_few_different_lengths(tmp_path, mini_corpus):
    for settings in ([], corpus_settings(mini_corpus)):
        recipe = tiny(tmp_path, *settings)
        loader = make_loader(recipe, start(recipe).encoder, compiled=True)
        assert {loader.batch(step).tokens.shape[1] for step in range(6)} <= {16, 32, 40}


def test_a_corpus_is_read_once_for_all_runs_that_share_a_cache(tmp_path, mini_corpus, monkeypatch):
    from powerclip.train import data_cache

    read = []
    original = data_cache.read_corpus
    monkeypatch.setattr(
        data_cache, "read_corpus", lambda *args, **kwargs: read.append(args) or original(*args, **kwargs)
    )
    cache = DataCache()
    recipe = tiny(tmp_path, *corpus_settings(mini_corpus))
    encoder = start(recipe).encoder
    loaders = [make_loader(recipe, encoder, cache=cache) for _ in range(3)]
    assert len(read) == 1
    assert loaders[0].corpus is loaders[2].corpus
    make_loader(tiny(tmp_path, *corpus_settings(mini_corpus), "data.trees=flat"), encoder, cache=cache)
    assert len(read) == 2


def copied(corpus: Path, folder: Path) -> Path:
    """The shards of a corpus alone."""
    folder.mkdir()
    for shard in corpus.glob("train-*.tar"):
        shutil.copy(shard, folder)
    return folder


def test_a_corpus_without_trees_is_refused_with_the_command_that_makes_them(tmp_path, mini_corpus):
    folder = copied(mini_corpus, tmp_path / "shards")
    settings = [*corpus_settings(folder)[:2], "train.steps=2", "data.trees=sidecars"]
    expected = (
        rf"no shard has its trees beside them .*`powerclip annotate trees '{folder}/train-\*.tar'`.*data.trees: flat"
    )
    with pytest.raises(UserError, match=expected):
        train(tiny(tmp_path, *settings), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    # Who looks at no trees needs none.
    for name, override in (("clip", "objective=clip"), ("tokens", "alignment.parse_trees=false")):
        train(tiny(tmp_path, *settings, override), tmp_path / name, quiet=True)


def test_a_file_of_trees_that_belongs_to_no_caption_is_refused(tmp_path, mini_corpus):
    (tmp_path / "trees.tsv").write_text("other\t0\t(NP a dog)\n")
    recipe = tiny(tmp_path, *corpus_settings(mini_corpus), f"data.trees={tmp_path}/trees.tsv")
    with pytest.raises(UserError, match=r"data\.trees: none of 18 captions has a tree .*trees\.tsv.*annotate trees"):
        train(recipe, tmp_path / "run", quiet=True)


def test_a_corpus_reads_the_trees_beside_its_shards_and_says_so(tmp_path, mini_corpus, capsys):
    folder = copied(mini_corpus, tmp_path / "shards")
    settings = [*corpus_settings(folder)[:2], "train.steps=2"]
    flat = train(tiny(tmp_path, *settings, "data.trees=flat"), tmp_path / "flat")
    assert "12 images, 18 captions; every caption is one phrase" in capsys.readouterr().out.replace("\n", " ")
    for shard in folder.glob("*.tar"):
        TreeAnnotator(load_parser("embedded", "cpu")).annotate(str(shard))
    parsed = train(tiny(tmp_path, *settings), tmp_path / "parsed")
    assert "trees of the sidecars beside the data" in capsys.readouterr().out.replace("\n", " ")
    nodes = [list(read_metrics(run.folder.metrics))[-1]["batch/nodes"] for run in (flat, parsed)]
    assert nodes[0] == 1 < nodes[1]


def test_a_corpus_may_lie_in_several_folders_with_its_trees_in_another(tmp_path, mini_corpus, monkeypatch):
    monkeypatch.setenv("POWERCLIP_DATA", str(tmp_path))
    folders, sidecars = [tmp_path / "one", tmp_path / "two"], tmp_path / "sidecars"
    for folder, shard in zip(folders, sorted(mini_corpus.glob("train-*.tar")), strict=True):
        folder.mkdir()
        shutil.copy(shard, folder)
        TreeAnnotator(load_parser("embedded", "cpu"), sidecars).annotate(str(shard))
    settings = ["data.source=corpus", "data.shards='${POWERCLIP_DATA}/{one/train-*,two/*}.tar'", "data.crop=1"]
    recipe = tiny(tmp_path, *settings, f"data.sidecars={sidecars}")
    loader = make_loader(recipe, start(recipe).encoder)
    assert isinstance(loader, CorpusLoader)
    assert len(loader.corpus.keys) == 12
    phrases = loader.batch(0).phrases
    assert phrases is not None
    assert phrases.max_nodes > 1  # parsed: captions have more than one phrase
    with pytest.raises(UserError, match=r"data\.shards: no file .*two/train-002\.tar"):
        check_inputs(tiny(tmp_path, "data.source=corpus", f"data.shards='{tmp_path}/two/train-{{001..002}}.tar'"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.shards=${NOT_SET_HERE}/a.tar", r"data\.shards: .*NOT_SET_HERE is not set"),
        ("data.shards=nowhere/*.tar", r"data\.shards: nothing matches nowhere/\*\.tar"),
        ("data.trees=nowhere.tsv", r"data\.trees: no file nowhere\.tsv; null reads the sidecars .* flat trains with"),
        ("evaluation.retrieval=nowhere.tar", r"evaluation\.retrieval: nothing matches"),
        ("evaluation.composition=nowhere", r"evaluation\.composition: no folder nowhere"),
        ("train.batch_size=100", r"train\.batch_size is 100, but the corpus has only 12"),
        ("data.shards=null", r"data\.source is corpus: set data\.shards"),
        ("data.crop=0", r"data\.crop must lie in \(0, 1\]"),
    ],
)
def test_what_is_missing_shows_before_anything_is_written(tmp_path, mini_corpus, override, expected):
    with pytest.raises(UserError, match=expected):
        train(tiny(tmp_path, *corpus_settings(mini_corpus), override), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", ["clip", "powerclip"])
def test_a_run_on_a_corpus_ends_with_its_scores(tmp_path, mini_corpus, objective):
    recipe = tiny(tmp_path, *corpus_settings(mini_corpus), f"objective={objective}", "train.evaluate_every=2")
    result = train(recipe, tmp_path / "run", quiet=True)
    written = read_results(result.folder.results)
    assert written == result.results
    assert {
        "retrieval/mean_recall",
        "retrieval/text_retrieval_recall@1",
        "composition/acc",
        "composition/replace_att/acc",
    } <= written.scores.keys()
    assert ("violation" in written.last) == (objective == "powerclip")
    assert written.seconds_per_step > 0


def test_a_model_trained_on_squashed_images_says_so(tmp_path, mini_corpus):
    import powerclip

    result = train(tiny(tmp_path, *corpus_settings(mini_corpus)), tmp_path / "run", quiet=True)
    loaded, preprocess, _ = powerclip.load(result.folder.model)
    assert loaded.clip.visual.preprocess_cfg["resize_mode"] == "squash"
    from PIL import Image

    half = Image.new("RGB", (60, 20))
    half.paste((255, 255, 255), (0, 0, 10, 20))  # a centre crop would not see it
    assert preprocess(half)[0, 8, 0] > 1
    assert torch.equal(preprocess(half)[0, 8, 0], preprocess(half)[0, 0, 0])


def test_a_run_that_keeps_no_model_is_finished_all_the_same(tmp_path, mini_corpus):
    recipe = tiny(tmp_path, *corpus_settings(mini_corpus), "train.save_model=false")
    result = train(recipe, tmp_path / "run", quiet=True)
    assert result.folder.finished
    assert not result.folder.model.exists()
    with pytest.raises(UserError, match="its model was not kept"):
        train(recipe, tmp_path / "run", resume=True, quiet=True)
