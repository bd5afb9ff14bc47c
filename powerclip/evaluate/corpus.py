"""Zero-shot retrieval on a held-out corpus (Flickr8k, COCO): all its images against all its captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powerclip.data.corpus import Corpus
from powerclip.data.tokens import CaptionTokenizer
from powerclip.evaluate.embeddings import embed_images, embed_texts, evaluating
from powerclip.evaluate.retrieval import Retrieval, recall

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder


def evaluate_corpus(encoder: DualEncoder, tokenizer: CaptionTokenizer, corpus: Corpus) -> Retrieval:
    """Recall at 1, 5 and 10, both ways, by the global embeddings of whole images and all captions."""
    with evaluating(encoder):
        images = embed_images(encoder, corpus.images)
        captions = embed_texts(encoder, tokenizer, corpus.captions)
        return recall(images, captions, corpus.image_of_caption.to(images.device))
