"""What the parser sees of a word does not depend on how it was typeset, or on the machine."""

from powerclip.annotate.parsers.word_features import hashed, normalise, shape


def test_words_that_differ_in_quotes_digits_or_width_are_one_word():
    assert normalise("``") == normalise("“") == normalise('"')
    assert normalise("1,984") == normalise("2,013")
    assert normalise("n’t") == "n't"
    assert normalise("Ｄｏｇ") == "Dog"
    assert len(normalise("x" * 10_000)) == 40


def test_shapes_and_hashes_are_stable():
    assert [shape(word) for word in ("Dog", "NASA", "t-shirt", "9:30pm")] == ["Xx", "X", "x-x", "0*0x"]
    assert hashed("dog", 1000) == hashed("dog", 1000)
    assert hashed("dog", 8192)[:3] == hashed("dog", 8192)[:3]
    assert all(0 <= row < 16 for row in hashed("\ud800dog", 16))
