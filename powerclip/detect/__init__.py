"""Open-vocabulary detection on an image tower: boxes are learned on base classes, names are text embeddings.

`train.train_detector` makes a detector, `saved.load_detector` reads one, `show.find_named` looks for what a user names,
and `evaluate.evaluate_detection` measures it (`powerclip detect`). The paper's Appendix G and Table 15.
"""
