"""The training script learns a small grammar, writes weights that load, and says what it measured."""

import gzip
import json
import random
from pathlib import Path

import pytest
import torch
from scoring import evaluate
from train import main
from treebank import read_treebank

from powerclip.annotate.parsers.embedded import EmbeddedParser
from powerclip.annotate.parsers.model import load_model
from powerclip.errors import UserError

SMALL = {
    "hidden": 24,
    "word-width": 16,
    "piece-width": 16,
    "span-width": 24,
    "buckets": 256,
    "batch": 8,
    "early-batch": 16,
}
SOURCES = Path(__file__).resolve().parents[2] / "tools" / "parser" / "sources.json"
FAST = {"lr": 1e-2, "warmup": 5, "dropout": 0.1, "average": 0.9}


def train(treebank: Path, output: Path, *more: str, **epochs: int) -> None:
    options = {"treebank": treebank, "output": output, "device": "cpu", **SMALL, **FAST, **epochs}
    main([part for name, value in options.items() for part in (f"--{name}", str(value))] + list(more))


def noun_phrase(draw: random.Random) -> str:
    words = [f"(DT {draw.choice(['a', 'the'])})"]
    words += [f"(JJ {draw.choice(['red', 'big', 'wet'])})"] * (draw.random() < 0.4)
    words.append(f"(NN {draw.choice(['dog', 'cat', 'chair', 'house', 'street'])})")
    return f"(NP {' '.join(words)})"


def tree(draw: random.Random) -> str:
    place = f"(PP (IN {draw.choice(['on', 'in', 'near'])}) {noun_phrase(draw)})"
    verb = f"(VP (VBG {draw.choice(['sitting', 'running'])}) {place})"
    return f"(ROOT (NP {noun_phrase(draw)} {verb} (. .)))"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parser")
    draw = random.Random(0)
    for number in range(9):
        (folder / f"GUM_toy_{number}.ptb").write_text("\n".join(tree(draw) for _ in range(12)))
    with gzip.open(folder / "trees.tsv.gz", "wt") as file:
        file.writelines(f"key{number}\t0\t{tree(draw)}\n" for number in range(60))
    sources = ["--sources", str(SOURCES)]
    train(folder, folder / "out", "--silver", str(folder / "trees.tsv.gz"), "--test", *sources, early=2, late=5)
    return folder


def test_it_learns_a_small_grammar(trained):
    card = json.loads((trained / "out" / "card.json").read_text())
    assert card["dev"]["unlabelled_f1"] > 90
    assert card["test"]["labelled_f1"] > 90
    assert card["sentences"]["gold test"] == 12
    assert card["settings"]["hidden"] == 24


def test_the_weights_that_were_written_score_what_the_card_says(trained):
    card = json.loads((trained / "out" / "card.json").read_text())
    model = load_model(trained / "out" / "parser.safetensors", torch.device("cpu"))
    assert evaluate(model, read_treebank(trained)["test"]).summary() == card["test"]


def test_the_parser_reads_raw_captions_with_these_weights(trained):
    parser = EmbeddedParser("cpu", weights=trained / "out" / "parser.safetensors")
    caption = "a dog sitting on the red chair ."
    (parsed,) = parser.parse([caption])
    phrases = {(caption[span.start : span.end], span.label) for span in parsed.spans}
    assert {("a dog", "NP"), ("sitting on the red chair", "VP"), ("the red chair", "NP")} <= phrases


def test_the_same_seed_gives_the_same_weights(trained, tmp_path):
    for run in ("one", "two"):
        train(trained, tmp_path / run, early=0, late=1)
    one, two = ((tmp_path / run / "parser.safetensors").read_bytes() for run in ("one", "two"))
    assert one == two


def test_a_file_that_is_no_model_is_one_line(tmp_path):
    path = tmp_path / "parser.safetensors"
    with pytest.raises(UserError, match="are not there"):
        load_model(path, torch.device("cpu"))
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="holds no weights of the embedded parser"):
        load_model(path, torch.device("cpu"))


def test_a_card_says_where_the_weights_learned_from_and_so_does_that_of_the_shipped_ones(trained):
    sources = json.loads(SOURCES.read_text(encoding="utf-8"))
    shipped = Path(load_model.__code__.co_filename).parent / "weights" / "card.json"
    for path in (trained / "out" / "card.json", shipped):
        card = json.loads(path.read_text(encoding="utf-8"))
        assert {name: card[name] for name in sources} == sources
    assert all(source["licence"] and source["url"] for source in sources["sources"])


def test_a_file_of_sources_that_is_none_is_refused(trained, tmp_path):
    (tmp_path / "sources.json").write_text("[1")
    with pytest.raises(UserError, match="not a JSON file"):
        train(trained, tmp_path / "out", "--sources", str(tmp_path / "sources.json"), early=0, late=1)
