"""The paper's mathematics as pure functions of tensors: regions, phrases, powerset similarities, the loss."""

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import Parts, embed_parts
from powerclip.alignment.loss import Alignment, alignment_loss
from powerclip.alignment.phrases import Phrases, embed_leaves, embed_nodes
from powerclip.alignment.regions import embed_regions, random_boxes

__all__ = [
    "Alignment",
    "AlignmentConfig",
    "Parts",
    "Phrases",
    "alignment_loss",
    "embed_leaves",
    "embed_nodes",
    "embed_parts",
    "embed_regions",
    "random_boxes",
]
