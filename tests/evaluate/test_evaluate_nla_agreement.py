"""The approximation study: what must hold of it whatever the vectors are."""

from __future__ import annotations

import json

import pytest
import torch
from mini_corpus import write_mini_corpus
from PIL import Image

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import Parts, embed_parts
from powerclip.alignment.loss import alignment_loss
from powerclip.data.batch import BatchSpec
from powerclip.data.corpus import read_corpus
from powerclip.data.corpus_loader import CorpusLoader, pack_corpus
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import build, load, save
from powerclip.errors import UserError
from powerclip.evaluate.nla_agreement import (
    ALPHAS,
    TAUS,
    NlaStudy,
    agreement,
    analyse,
    corpus_vectors,
    loss_terms,
    measure_agreement,
    random_vectors,
)
from powerclip.evaluate.nla_figure import losses_figure, scores_figure


@pytest.fixture(scope="module")
def grid():
    study = NlaStudy(pairs=8, regions=6)
    return measure_agreement("random", [random_vectors(study, batch, width=64) for batch in range(2)])


def test_every_point_of_the_grid_is_there(grid):
    assert [(point.tau, point.alpha) for point in grid.points] == [(tau, alpha) for tau in TAUS for alpha in ALPHAS]
    assert grid.pairs == 16


def test_t2r_is_nearly_exact_at_a_small_temperature_and_does_not_know_alpha(grid):
    points = [grid.at(0.001, alpha) for alpha in ALPHAS]
    assert all(point.t2r == points[0].t2r for point in points)
    assert points[0].t2r.r > 0.9999
    assert grid.at(0.1, 0.0).t2r.bias > abs(points[0].t2r.bias)


def test_alpha_moves_r2t_from_below_the_exact_values_to_above(grid):
    biases = [grid.at(0.001, alpha).r2t.bias for alpha in ALPHAS]
    assert biases == sorted(biases)
    assert biases[0] < 0 < biases[-1]


def test_the_mean_of_the_pair_losses_is_the_loss_that_trains():
    vectors = random_vectors(NlaStudy(pairs=8, regions=6, seed=3), 0, width=64)
    config = AlignmentConfig.named("paper", aggregation="exact", gamma=0.2)
    parts = Parts(vectors.regions.float(), vectors.nodes.float(), vectors.segments)
    assert measure_agreement("one", [vectors]).exact["loss"].mean().item() == pytest.approx(
        alignment_loss(parts, config).loss.item(), rel=1e-4
    )


def test_loss_terms_by_hand():
    # Of pair 0: 0.5 − 1 + 0.2 < 0 in its row, 0.9 − 1 + 0.2 in its column; of pair 1: 0.9 − 0.4 + 0.2, 0.5 − 0.4 + 0.2.
    rows, columns = loss_terms(torch.tensor([[1.0, 0.5], [0.9, 0.4]]))
    assert rows.tolist() == pytest.approx([0.0, 0.7])
    assert columns.tolist() == pytest.approx([0.1, 0.3])


def test_each_direction_is_compared_by_itself(grid):
    for tau, alpha in ((0.1, 0.0), (0.001, 0.75)):
        values = grid.approximate[tau, alpha]
        torch.testing.assert_close(values["loss"], values["rows"] + values["columns"])
        assert len(values["t2r"]) == len(grid.exact["r2t"]) == 2 * 8 * 8
        for name in ("t2r", "r2t", "rows", "columns", "loss"):
            assert getattr(grid.at(tau, alpha), name) == agreement(values[name], grid.exact[name])


def test_the_papers_two_figures_show_every_tau(grid):
    losses, scores = losses_figure([grid]), scores_figure([grid])
    assert [len(figure.subfigs[0].axes) for figure in (losses, scores)] == [9, 6]
    titles = [axes.get_title() for axes in scores.subfigs[0].axes]
    assert titles == [f"{name}, τ = {tau:g}" for name in ("NLA-T1 and T2R", "NLA-T2 and R2T") for tau in TAUS]
    for number, panel in enumerate(scores.subfigs[0].axes):
        assert len(panel.collections) == (1 if number < 3 else len(ALPHAS))
        assert len(panel.collections[0].get_offsets()) == 2 * 8 * 8
    assert [axes.get_title() for axes in losses.subfigs[0].axes[:3]] == [f"Φ(Q), τ = {tau:g}" for tau in TAUS]


def test_agreement_of_shifted_values_has_their_order_and_a_bias():
    exact = torch.tensor([1.0, 2.0, 3.0])
    shifted = agreement(exact + 2, exact)
    assert shifted.r == pytest.approx(1)
    assert shifted.bias == pytest.approx(2)
    assert str(shifted) == "1.0000 (+2.00)"
    assert agreement(torch.ones(3), exact).r is None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "head_width": 16, **tower},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "heads": 2, **tower},
    }
    return str(save(build(config=config), tmp_path_factory.mktemp("model") / "tiny"))


def test_a_models_own_embeddings_are_studied_beside_random_ones(model, tmp_path):
    both = analyse(tmp_path / "out", NlaStudy(model, batches=1, pairs=4, regions=4))
    assert [grid.source for grid in both] == ["random vectors", f"{model}, embedded scenes"]
    assert both[1].at(0.001, 0.5).t2r.r > 0.999
    written = json.loads((tmp_path / "out" / "nla.json").read_text())
    assert [len(one["points"]) for one in written["studies"]] == [15, 15]
    with Image.open(tmp_path / "out" / "nla.png") as image:
        two = image.height
    analyse(tmp_path / "alone", NlaStudy(batches=1, pairs=4, regions=4))
    with Image.open(tmp_path / "alone" / "nla.png") as image:
        assert two == 2 * image.height  # a line of panels for each source
    assert len(both[0].table().rows) == 15


def test_pairs_of_shards_are_studied_in_place_of_scenes(model, tmp_path):
    folder = write_mini_corpus(tmp_path / "data")
    reported = []

    def of_shards(trees):
        study = NlaStudy(model, str(folder / "train-*.tar"), trees, batches=3, pairs=4)
        return analyse(tmp_path / "out", study, reported.append)[1]

    parsed, flat = of_shards(str(folder / "trees.tsv")), of_shards(None)
    assert parsed.source == f"{model}, train-000.tar … train-001.tar"
    assert parsed.pairs == 12
    assert reported == ["train-000.tar … train-001.tar: 12 images, 18 captions"] * 2
    assert not torch.equal(parsed.exact["loss"], flat.exact["loss"])  # "a wall number 7" is a phrase in one only


def test_vectors_of_shards_are_those_that_training_sees(model, tmp_path):
    folder = write_mini_corpus(tmp_path)
    encoder, _, tokenizer = load(model)
    encoder.eval()
    corpus = read_corpus([folder / "train-000.tar"], 32, folder / "trees.tsv")
    spec = BatchSpec(image_size=(32, 32), grid=(4, 4), batch_size=4, crop=1.0)
    loader = CorpusLoader(pack_corpus(corpus, CaptionTokenizer(tokenizer)), spec)
    batch = loader.batch(0)
    with torch.inference_mode():
        (_, patches), (_, words) = encoder.encode_patches(batch.images), encoder.encode_words(batch.tokens)
        parts = embed_parts(patches, batch.regions, words, batch.phrases, AlignmentConfig.named("paper"))
    vectors = corpus_vectors(encoder, loader, 0)
    torch.testing.assert_close(vectors.regions.float(), parts.regions)
    torch.testing.assert_close(vectors.nodes.float(), parts.nodes)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"shards": "{folder}/val-000.tar"}, "--shards needs --model"),
        ({"model": "{model}", "trees": "{folder}/trees.tsv"}, "--trees belong to the captions of --shards"),
        ({"model": "{model}", "shards": "{folder}/no-*.tar"}, "--shards: nothing matches"),
        ({"model": "{model}", "shards": "{folder}/val-000.tar", "trees": "{folder}/no.tsv"}, "--trees: no file"),
        ({"model": "{model}", "shards": "{folder}/val-000.tar"}, "has 6 images .* need 16: ask for --batches 1"),
        ({"model": "{model}", "shards": "{folder}/val-000.tar", "pairs": 8}, "need 32: name more shards"),
    ],
)
def test_what_cannot_be_studied_is_said_and_nothing_is_written(asked, answer, model, tmp_path):
    folder = write_mini_corpus(tmp_path / "data")
    settings = {
        key: value.format(folder=folder, model=model) if isinstance(value, str) else value
        for key, value in asked.items()
    }
    with pytest.raises(UserError, match=answer):
        analyse(tmp_path / "out", NlaStudy(**{"batches": 4, "pairs": 4, **settings}))
    assert not (tmp_path / "out").exists()
