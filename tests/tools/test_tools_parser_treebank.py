"""Brackets become words, tags and spans; the gold treebank is split by document; sentences can look like captions."""

import gzip
import random

import pytest
from augment import augment, drop_full_stop, join_hyphens
from treebank import read_sentence, read_silver, read_treebank

from powerclip.errors import UserError

DOG = "(ROOT (S (NP-SBJ-1 (DT A) (NN dog)) (VP (VBZ is) (ADJP (JJ snow) (HYPH -) (JJ covered))) (. .)))"


def test_functions_and_traces_go_and_unary_chains_become_one_label():
    sentence = read_sentence("(TOP (S (NP-SBJ (-NONE- *)) (VP (VB Go) (ADVP=2 (RB home) (-NONE- *T*)))) )")
    assert sentence.words == ("Go", "home")
    assert sentence.tags == ("VB", "RB")
    assert set(sentence.spans) == {(0, 2, "S+VP"), (1, 2, "ADVP")}


def test_brackets_in_the_text_are_read_back():
    assert read_sentence("(ROOT (NP (-LRB- -LRB-) (NN a) (-RRB- -RRB-)))").words == ("(", "a", ")")


def test_two_phrases_side_by_side_have_a_root_of_their_own():
    assert (0, 2, "ROOT") in read_sentence("(ROOT (NP (NN a)) (NP (NN b)))").spans


def test_of_nine_documents_of_a_genre_one_is_for_development_and_one_for_the_test(tmp_path):
    for genre in ("news", "bio"):
        for number in range(9):
            (tmp_path / f"GUM_{genre}_{number}.ptb").write_text(f"(ROOT (NP (NN {genre}{number})))\n")
    parts = read_treebank(tmp_path)
    assert [sentence.words[0] for sentence in parts["dev"]] == ["bio4", "news4"]
    assert [sentence.words[0] for sentence in parts["test"]] == ["bio8", "news8"]
    assert len(parts["train"]) == 14


def test_a_folder_without_trees_and_a_file_that_does_not_bracket_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no \.ptb files in"):
        read_treebank(tmp_path)
    (tmp_path / "GUM_news_x.ptb").write_text("(ROOT (NP (NN a))")
    with pytest.raises(UserError, match=r"GUM_news_x\.ptb.*never closed"):
        read_treebank(tmp_path)


def test_all_captions_of_an_image_are_in_the_same_part(tmp_path):
    path = tmp_path / "trees.tsv.gz"
    with gzip.open(path, "wt") as file:
        for key in range(200):
            file.writelines(f"image{key}\t{number}\t(ROOT (NP (NN dog)))\n" for number in range(2))
    parts = read_silver(path)
    test = [sentence.document for sentence in parts["test"]]
    assert test
    assert not set(test) & {sentence.document for sentence in parts["train"]}
    assert all(test.count(key) == 2 for key in test)


def test_captions_of_other_sources_are_scored_but_not_learned_from(tmp_path):
    path = tmp_path / "trees.tsv.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(f"{kind}-{key}\t0\t(ROOT (NP (NN dog)))\n" for key in range(200) for kind in ("coco", "other"))
    parts, of_all = read_silver(path, learn_from="coco-"), read_silver(path)
    assert {sentence.document.split("-")[0] for sentence in parts["train"]} == {"coco"}
    assert parts["test"] == of_all["test"]
    with pytest.raises(UserError, match="no key begins with 'voc-'"):
        read_silver(path, learn_from="voc-")


def test_a_line_that_is_no_tree_is_named(tmp_path):
    path = tmp_path / "trees.tsv.gz"
    with gzip.open(path, "wt") as file:
        file.write("key\t0\t(ROOT (NP (NN dog)))\nkey\t(NP)\n")
    with pytest.raises(UserError, match="line 2"):
        read_silver(path)


def test_hyphens_are_joined_where_no_phrase_ends_between():
    joined = join_hyphens(read_sentence(DOG))
    assert joined.words == ("A", "dog", "is", "snow-covered", ".")
    assert set(joined.spans) == {(0, 5, "S"), (0, 2, "NP"), (2, 4, "VP"), (3, 4, "ADJP")}
    apart = read_sentence("(NP (NP (NN New)) (HYPH -) (NP (NN York)))")
    assert join_hyphens(apart) == apart


def test_without_its_full_stop_a_sentence_keeps_the_inner_label_of_spans_that_become_one():
    sentence = drop_full_stop(read_sentence("(ROOT (NP (NP (DT a) (NN dog)) (. .)))"))
    assert sentence.words == ("a", "dog")
    assert sentence.spans == ((0, 2, "NP"),)
    both = drop_full_stop(read_sentence("(ROOT (S (VP (VB go) (RB home)) (. .)))"))
    assert both.spans == ((0, 2, "VP"),)


def test_augmented_sentences_are_trees_over_their_words():
    sentence = read_sentence(DOG)
    draw = random.Random(0)
    for _ in range(200):
        changed = augment(sentence, draw)
        assert len(changed.words) == len(changed.tags)
        assert (0, len(changed.words)) in {span[:2] for span in changed.spans}
        assert all(0 <= first < end <= len(changed.words) for first, end, _ in changed.spans)
