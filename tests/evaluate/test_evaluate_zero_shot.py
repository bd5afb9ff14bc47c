import pytest
import torch
from torch.nn.functional import normalize

from powerclip.errors import UserError
from powerclip.evaluate.zero_shot import accuracy, class_embeddings


def test_a_class_is_the_normalised_mean_of_its_normalised_prompts():
    vectors = {"a photo of a dog": [2.0, 0.0], "art of a dog": [0.0, 0.5]}
    vectors |= {"a photo of a cat": [-3.0, 0.0], "art of a cat": [-0.1, 0.0]}
    classes = class_embeddings(
        lambda captions: torch.tensor([vectors[c] for c in captions]),
        ["dog", "cat"],
        ["a photo of a {c}", "art of a {c}"],
    )
    # The long prompt must not outweigh the short one.
    torch.testing.assert_close(classes, torch.tensor([[0.5**0.5, 0.5**0.5], [-1.0, 0.0]]))


def test_a_template_without_a_place_for_the_name_is_refused():
    with pytest.raises(UserError, match=r"'a photo' has no \{c\}"):
        class_embeddings(lambda captions: torch.zeros(len(captions), 2), ["dog"], ["a photo"])


@pytest.mark.parametrize(("names", "templates"), [([], ["a {c}"]), (["dog"], [])])
def test_no_class_or_no_template_is_refused(names, templates):
    with pytest.raises(UserError, match="at least one class name and one template"):
        class_embeddings(lambda captions: torch.zeros(len(captions), 2), names, templates)


def test_accuracy_equals_a_loop_over_topk():
    torch.manual_seed(0)
    images, classes = normalize(torch.randn(200, 6), dim=1), normalize(torch.randn(9, 6), dim=1)
    labels = torch.randint(9, (200,))
    for k, ours in accuracy(images, classes, labels, cutoffs=(1, 3, 9)).items():
        hits = [
            int(label) in (classes @ image).topk(k).indices.tolist()
            for image, label in zip(images, labels, strict=True)
        ]
        assert ours == sum(hits) / 200


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_collapsed_model_classifies_nothing(value):
    embeddings = torch.full((7, 3), value)
    assert accuracy(embeddings, embeddings, torch.arange(7)) == {1: 0.0, 5: 0.0}
