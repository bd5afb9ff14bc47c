"""A trained model for where it is deployed: transformers, ONNX Runtime and browsers, torch alone, the hub.

folder.py        `export_model`: one form of a model as a folder, checked and described; all of it or nothing
towers.py        the two towers as modules that can be traced, with the ecosystem's names
onnx.py, pt2.py, hugging_face.py    one form each: how it is written, and how it is run
processor.py     tokenizer and image processor as files that transformers reads
check.py         parity with the model, on images and captions
card.py          the model card
push.py          upload to the hub
"""
