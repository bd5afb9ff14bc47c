"""Keys and captions are read by the same rule in annotation and training."""

from __future__ import annotations

import json

import pytest

from powerclip.data.captions import content_hash, number_captions, read_captions, split_member


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("00012.jpg", ("00012", "jpg")),
        ("./a/b/00012.JPG", ("00012", "jpg")),
        ("key.seg.png", ("key", "seg.png")),
        ("README", ("README", "")),
    ],
)
def test_a_members_key_is_its_name_up_to_the_first_dot(name, expected):
    assert split_member(name) == expected


def test_captions_come_from_text_and_from_both_fields_of_json():
    assert read_captions(b"  a dog \n", "txt") == ["a dog"]
    assert read_captions(json.dumps({"captions": ["a", "", 3, " b "]}).encode(), "json") == ["a", " b "]
    assert read_captions(json.dumps({"caption": "a", "captions": []}).encode(), "json") == ["a"]


def test_a_caption_has_the_number_of_its_place_whatever_is_left_out_before_it():
    assert number_captions(json.dumps({"captions": ["", "a", 3, "b"]}).encode(), "json") == [(1, "a"), (3, "b")]
    assert number_captions(b"a dog", "txt") == [(0, "a dog")]


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[1]", b"{", b"null", b'{"caption": null}', b"[" * 100_000])
def test_what_holds_no_caption_gives_none(data):
    assert read_captions(data, "json") == []


def test_a_hash_tells_captions_apart_and_takes_any_text():
    assert content_hash("a dog") == content_hash(b"a dog")
    assert content_hash("a dog") != content_hash("a dog ")
    assert 0 <= content_hash("\ud800") < 2**64
