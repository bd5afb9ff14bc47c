"""Hard negatives from the captions' own trees: one change away from a caption, false of its image, and readable."""

from powerclip.evaluate.hard_negatives.make import KINDS, Made, make_negatives, to_json

__all__ = ["KINDS", "Made", "make_negatives", "to_json"]
