"""Speed and accuracy of the parsers.

    python benchmarks/parsers.py --data $POWERCLIP_DATA            # embedded, on the CPU and on a GPU when there is one
    python benchmarks/parsers.py --data $POWERCLIP_DATA --parsers embedded stanza benepar
    python benchmarks/parsers.py --tiny                            # seconds, without data: shows that it works

Speed: raw captions of captions10k in, character spans out, everything included; the first pass, which sees the words
for the first time, is not counted. Accuracy: F1 on GUM's test documents by genre, and agreement with the Stanford
PCFG's trees on captions held out from training, both from the treebanks' own words; beside it the F1 from raw text,
where the sentence is put together again and cut by our tokeniser. Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from measure import RESULTS, markdown, origin, run, write_result

from powerclip.annotate.parsers import PARSERS, Parser, load_parser
from powerclip.annotate.parsers.embedded import EmbeddedParser
from powerclip.data.tar_index import make_index, sample_captions

sys.path.append(str(Path(__file__).parents[1] / "tools" / "parser"))
from scoring import by_genre, detokenize, evaluate, raw_score
from treebank import read_silver, read_treebank

FEW = ["a dog sitting on a red chair", "Two people standing in the middle of an empty street with a bear on a rope ."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with treebank/ and captions10k/")
    parser.add_argument("--parsers", nargs="*", choices=PARSERS, default=["embedded"])
    parser.add_argument("--weights", type=Path, help="weights of the embedded parser, instead of the shipped ones")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--captions", type=int, default=20_000, help="most captions on a CPU; on a GPU all are parsed")
    parser.add_argument("--no-accuracy", action="store_true", help="measure speed only")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if not arguments.tiny and not arguments.data:
        parser.error("--data is needed: the folder with treebank/ and captions10k/")
    if arguments.tiny:
        arguments.repeats = 1
    torch.set_num_threads(arguments.threads)
    captions = FEW * 20 if arguments.tiny else read_captions(arguments.data / "captions10k")
    speeds = measure_speeds(captions, arguments)
    accuracy = {} if arguments.tiny or arguments.no_accuracy else measure_accuracy(arguments)
    write(speeds, accuracy, arguments)


def read_captions(folder: Path) -> list[str]:
    """The raw captions of the shards; without shards, those of the trees put together again."""
    captions: list[str] = []
    for shard in sorted(folder.glob("*.tar")):
        index = make_index(shard)
        with shard.open("rb") as file:
            samples = (sample_captions(file.fileno(), index, number) for number in range(len(index)))
            captions += [caption for sample in samples for _, caption in sample]
    if captions:
        return captions
    return [detokenize(sentence)[0] for part in read_silver(folder / "trees.tsv.gz").values() for sentence in part]


def make_parser(name: str, device: str, arguments: argparse.Namespace) -> Parser:
    options = {"weights": arguments.weights} if name == "embedded" and arguments.weights else {}
    return load_parser(name, device, **options)


def measure_speeds(captions: list[str], arguments: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    devices = ["cpu", "cuda"] if torch.cuda.is_available() and not arguments.tiny else ["cpu"]
    for name in arguments.parsers:
        for device in devices:
            sample = captions if device == "cuda" else captions[:: max(1, len(captions) // arguments.captions)]
            parser = make_parser(name, device, arguments)
            parser.parse(sample)
            rates = []
            for _ in range(arguments.repeats):
                start = time.perf_counter()
                parsed = parser.parse(sample)
                rates.append(len(sample) / (time.perf_counter() - start))
            row = {
                "parser": name,
                "version": parser.version,
                "device": device,
                "threads": arguments.threads,
                "captions": len(sample),
                "captions_per_second": statistics.median(rates),
                "smallest": min(rates),
                "largest": max(rates),
                "nodes": sum(len(tree.spans) for tree in parsed) / len(parsed),
                "flat": sum(tree.fallback is not None for tree in parsed),
            }
            rows.append(row)
            print(f"{name} on {device}: {row['captions_per_second']:,.0f} captions/s", flush=True)
    return rows


def measure_accuracy(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """F1 by test set: the embedded parser on the treebank's own words, every parser on raw text."""
    gold = read_treebank(arguments.data / "treebank")["test"]
    silver = read_silver(arguments.data / "captions10k" / "trees.tsv.gz")["test"]
    scores: dict[str, dict[str, float]] = {}
    for name in arguments.parsers:
        parser = make_parser(name, "auto", arguments)
        if isinstance(parser, EmbeddedParser):
            scores["embedded, GUM test"] = evaluate(parser.model, gold).summary()
            for genre, score in by_genre(parser.model, gold).items():
                scores[f"embedded, GUM test, {genre}"] = score.summary()
            scores["embedded, held-out captions (silver)"] = evaluate(parser.model, silver).summary()
        scores[f"{name}, GUM test, raw text"] = raw_score(parser, gold).summary()
    return scores


def write(
    speeds: list[dict[str, object]], accuracy: dict[str, dict[str, float]], arguments: argparse.Namespace
) -> None:
    rows = [
        [
            row["parser"],
            row["device"] if row["device"] == "cuda" else f"{row['threads']} CPU thread{'s' * (row['threads'] != 1)}",
            f"{row['captions_per_second']:,.0f} ({row['smallest']:,.0f} … {row['largest']:,.0f})",
            f"{row['captions']:,}",
            f"{row['nodes']:.1f}",
            row["flat"],
        ]
        for row in speeds
    ]
    text = "# Parsers\n\n" + markdown(rows, ["parser", "on", "captions/s", "captions", "nodes each", "flat"])
    if accuracy:
        figures = [
            [
                name,
                f"{at['sentences']:.0f}",
                *(f"{at[kind + '_f1']:.1f}" for kind in ("unlabelled", "labelled", "inner")),
            ]
            for name, at in accuracy.items()
        ]
        text += "\n\n" + markdown(figures, ["F1 on", "sentences", "unlabelled", "labelled", "inner"])
    name = "parsers-tiny" if arguments.tiny else f"parsers-{'cuda' if torch.cuda.is_available() else 'cpu'}"
    path = write_result(arguments.output, name, origin(), {"speed": speeds, "accuracy": accuracy}, text)
    print(f"\n{text}\n\n{path}.md")


if __name__ == "__main__":
    run(main)
