"""Kernels run on the GPU where there is one; elsewhere Triton interprets them, if it is told so before its import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
