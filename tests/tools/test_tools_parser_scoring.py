"""F1 counts brackets as evalb does."""

from types import SimpleNamespace

import pytest
from scoring import Score, detokenize, raw_score
from treebank import read_sentence

from powerclip.annotate.parsers.base import Parsed
from powerclip.data.trees import tree_from_spans

GOLD = read_sentence("(ROOT (S (NP (DT a) (NN dog)) (VP (VBZ is) (VP (VBG eating) (NP (NN grass)))) (. .)))")


def scored(guess: str) -> Score:
    score = Score()
    score.add(read_sentence(guess).spans, GOLD.spans, GOLD.tags)
    return score


def test_a_tree_agrees_with_itself():
    score = Score()
    score.add(GOLD.spans, GOLD.spans, GOLD.tags)
    assert [score.f1(kind) for kind in ("labelled", "unlabelled", "inner")] == [100, 100, 100]
    assert score.exact == 1


def test_where_punctuation_hangs_does_not_matter():
    other = "(ROOT (S (NP (DT a) (NN dog)) (VP (VBZ is) (VP (VBG eating) (NP (NN grass)) (. .)))))"
    assert scored(other).f1("labelled") == 100


def test_precision_and_recall_by_hand():
    # Gold: S 0-5, NP 0-2, VP 2-5, VP 3-5, NP 4-5. Guess: S 0-5, NP 0-2, NP 2-5.
    score = scored("(ROOT (S (NP (DT a) (NN dog)) (NP (VBZ is) (VBG eating) (NN grass)) (. .)))")
    assert score.precision("labelled") == pytest.approx(100 * 2 / 3)
    assert score.recall("labelled") == pytest.approx(100 * 2 / 5)
    assert score.precision("unlabelled") == 100
    assert score.recall("unlabelled") == pytest.approx(100 * 3 / 5)
    assert score.f1("unlabelled") == pytest.approx(75)
    # Inner: 0-2, 2-5 and 3-5; neither the sentence nor a single word.
    assert score.recall("inner") == pytest.approx(100 * 2 / 3)


def test_a_unary_chain_counts_as_many_brackets_as_it_has_labels():
    gold = read_sentence("(ROOT (S (VP (VB go) (ADVP (RB home)))))")
    score = Score()
    score.add([(0, 2, "VP"), (1, 2, "ADVP")], gold.spans, gold.tags)
    assert score.right["labelled"] == score.right["unlabelled"] == 3
    assert score.agree["labelled"] == score.agree["unlabelled"] == 2


def test_the_root_is_not_counted():
    score = Score()
    score.add([(0, 2, "ROOT")], [(0, 2, "ROOT")], ["NN", "NN"])
    assert score.right["labelled"] == 0
    assert score.f1("labelled") == 0


def test_a_sentence_is_written_as_people_write():
    text, offsets = detokenize(
        read_sentence(
            "(ROOT (S (`` ``) (NP (NNP Ann) (POS 's)) (NN t) (HYPH -) (NN shirt) ('' '') (VBZ is) (RB n't)"
            " (-LRB- -LRB-) (JJ red) (-RRB- -RRB-) (. .)))"
        )
    )
    assert text == "\"Ann's t-shirt\" isn't (red)."
    assert [text[start:end] for start, end in offsets][:4] == ['"', "Ann", "'s", "t"]


def test_the_gold_tree_as_raw_text_scores_full():
    def parse(captions):
        (caption,) = captions
        assert caption == "a dog is eating grass."
        _, offsets = detokenize(GOLD)
        spans = [SimpleNamespace(start=offsets[a][0], end=offsets[b - 1][1], label=label) for a, b, label in GOLD.spans]
        return [Parsed(tree_from_spans(spans, caption).nodes)]

    score = raw_score(SimpleNamespace(name="gold", version="1", parse=parse), [GOLD])
    assert score.f1("labelled") == score.f1("unlabelled") == 100
