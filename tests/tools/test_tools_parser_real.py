"""On real text: the parser that ships keeps its promises on GUM's test documents and on captions10k."""

import gzip

import torch
from scoring import detokenize, evaluate
from treebank import read_sentence, read_treebank

from powerclip.annotate.parsers.embedded import WEIGHTS
from powerclip.annotate.parsers.model import load_model
from powerclip.annotate.parsers.word_features import normalise
from powerclip.annotate.parsers.word_tokenizer import tokenize


def test_unlabelled_f1_on_the_test_documents_is_above_80(real_data):
    model = load_model(WEIGHTS, torch.device("cpu"))
    score = evaluate(model, read_treebank(real_data / "treebank")["test"])
    assert score.sentences == 492
    assert score.f1("unlabelled") > 80


def test_the_tokeniser_cuts_captions_as_the_treebanks_do(real_data):
    same = total = 0
    with gzip.open(real_data / "captions10k" / "trees.tsv.gz", "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % 20 == 0:
                sentence = read_sentence(line.split("\t")[2])
                cut = [normalise(token) for token, _, _ in tokenize(detokenize(sentence)[0])]
                same += cut == [normalise(word) for word in sentence.words]
                total += 1
    assert same / total > 0.98
