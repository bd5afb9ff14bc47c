import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from powerclip.data.tokens import CaptionTokenizer
from powerclip.data.trees import parse_bracketed
from powerclip.encoders import build
from powerclip.evaluate.heatmap import patch_similarity, text_queries, word_queries

CAPTION = "a dog sitting on a red chair"
TREE = parse_bracketed("(NP (NP a dog) (VP sitting (PP on (NP a red chair))))", CAPTION)


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    tower = {"width": 32, "layers": 1}
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 16, "patch_size": 8, "head_width": 16, **tower},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "heads": 2, **tower},
    }
    return build(config=config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return CaptionTokenizer(context_length=16)


def test_similarity_is_the_cosine_of_each_patch_with_its_query():
    patches, queries = torch.randn(3, 5, 8), torch.randn(3, 8)
    ours = patch_similarity(patches, queries)
    for t in range(3):
        for n in range(5):
            torch.testing.assert_close(ours[t, n], cosine_similarity(patches[t, n], queries[t], dim=0))


def test_one_image_serves_many_queries():
    patches, queries = torch.randn(5, 8), torch.randn(3, 8)
    torch.testing.assert_close(
        patch_similarity(patches[None], queries), patch_similarity(patches.expand(3, 5, 8), queries)
    )


@torch.inference_mode()
def test_a_phrase_is_the_sum_of_its_normalised_leaves_in_the_order_of_the_tree(encoder, tokenizer):
    captions = ["two cats", CAPTION]
    trees = [parse_bracketed("(NP two cats)", "two cats"), TREE]
    queries = word_queries(encoder, tokenizer, captions, trees)
    _, words = encoder.encode_words(tokenizer.pad([tokenizer.encode(CAPTION).ids]))

    def leaf(start, end):  # every word is one token here, and the start token comes first
        return normalize(words[0, start + 1 : end + 1].sum(0), dim=0)

    dog, sitting, on, chair = leaf(0, 2), leaf(2, 3), leaf(3, 4), leaf(4, 7)
    expected = {
        "a dog": dog,
        "sitting on a red chair": sitting + on + chair,
        "on a red chair": on + chair,
        "a red chair": chair,
        CAPTION: dog + sitting + on + chair,
    }
    assert len(queries) == 1 + len(TREE.nodes)
    for node, query in zip(TREE.nodes, queries[1:], strict=True):
        torch.testing.assert_close(query, expected[CAPTION[node.start : node.end]], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_text_query_is_the_embedding_that_retrieval_uses(encoder, tokenizer):
    queries = text_queries(encoder, tokenizer, ["a dog", CAPTION])
    alone = encoder.encode_text(tokenizer.pad([tokenizer.encode("a dog").ids], full=True))
    torch.testing.assert_close(queries[:1], alone, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_caption_cut_at_the_context_length_still_has_a_query_for_each_node(encoder, tokenizer):
    long = " ".join(["a dog"] * 12)
    tree = parse_bracketed(f"(NP {' '.join(['(NP a dog)'] * 12)})", long)
    queries = word_queries(encoder, tokenizer, [long], [tree])
    assert queries.shape == (13, 16)
    assert queries.isfinite().all()
