"""Compile every kernel for a GPU that need not be there: python compile_kernels.py CAPABILITY, 80 or 90.

Prints a line for each. The interpreter runs kernels that no GPU would take.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from powerclip.alignment.kernels import (
    best_sets,
    exact_all,
    exact_all_grad,
    exact_pairs,
    nla_all,
    nla_pairs,
    pairs,
    split_halves,
)

WHOLE = "*i64", "offsets other_offsets image caption other order starts further extra"
SINGLE = (
    "*fp32",
    "regions nodes scores of_scores of_q similarities q scale sums vectors values inverse of_inverse unit best",
)
HALF = "*fp16", "high low high_copy"
FRACTION = "fp32", "tau t2r_unit r2t_unit mean_weight alpha log_sets set_unit t2r_scale r2t_scale"
TYPES = {name: kind for kind, names in (WHOLE, SINGLE, HALF, FRACTION) for name in names.split()}

SETTINGS = {"EMPTY": False, "SINGLE": True, "T2R": True, "R2T": True}
PAIR = {**SETTINGS, "TILE_K": 32, "TILE_M": 16, "TILE_D": 64}
DENSE = {**SETTINGS, "M": 10, "IMAGES": 256, "STRIDE": 512, "FAST": True, "TILE_B": nla_all.TILE_IMAGES}
SMALL = {**DENSE, "IMAGES": 32, "STRIDE": 32, "TILE_B": nla_all.SMALL_TILE_IMAGES, "num_warps": 1}
SUM = {"TILE_A": 32, "TILE_B": 16, "TILE_D": 64, "TOGETHER": pairs.TOGETHER, "PIECE": pairs.PIECE}
HALVES = {"of_q": "*fp16"}
BY_SUMS = {**DENSE, "LOW": 5, "MIDDLE": 2, "FUSED": True, "LENGTHS": False, "BITS": 5, "SLAB": 1}
BY_COSINE = {**BY_SUMS, "MIDDLE": 1, "LENGTHS": True, "SLAB": exact_all_grad.SLAB}
WON, WON_BY_COSINE = ({**HALVES, "winners": kind, "best_sets": "*i32"} for kind in ("*i32", "*i16"))
KERNELS = [
    (best_sets._best_sets, BY_COSINE, {"numbers": "*i32"}),
    (exact_all._exact_scores, BY_SUMS, {}),
    (exact_all._exact_scores, {**BY_SUMS, "LENGTHS": True, "T2R": False}, {}),
    (exact_all_grad._winners, BY_SUMS, {"winners": "*i32"}),
    (exact_all_grad._winners, BY_COSINE, {"winners": "*i16"}),
    (exact_all_grad._similarity_gradients, {**BY_SUMS, "SLOTS": exact_all_grad.SLOTS}, WON),
    (
        exact_all_grad._similarity_gradients,
        {**BY_COSINE, "SLOTS": exact_all_grad.SLOTS_WITH_LENGTHS},
        WON_BY_COSINE,
    ),
    (exact_pairs._exact_of_pairs, {**PAIR, "M": 10, "TILE_S": exact_pairs.TILE_SETS}, {}),
    (exact_pairs._exact_of_pairs, {**PAIR, "M": 14, "TILE_S": exact_pairs.TILE_SETS}, {}),  # 16 tiles of sets
    (nla_all._scores, DENSE, {}),
    (nla_all._scores, SMALL, {}),
    (nla_all._similarity_gradients, DENSE, HALVES),
    (nla_pairs._nla_of_pairs, {**PAIR, "FAST": True}, {}),
    (pairs._add_pieces, SUM, {}),
    (pairs._piece_sums, {**SUM, "SWEEP": 8, "num_stages": pairs.STAGES}, {}),
    (split_halves._write_halves, {"COPY": True, "TILE_R": 4, "TILE_D": 512}, {}),
]


def compile_for(capability: int) -> None:
    """Compile all of them."""
    for kernel, settings, types in KERNELS:
        constants = {name: settings[name] for name in kernel.arg_names if name in settings}
        options = {name: settings[name] for name in ("num_warps", "num_stages") if name in settings}
        kinds = {**TYPES, **types, **dict.fromkeys(constants, "constexpr")}
        signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
        positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=positions)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        print(kernel.__module__.split(".")[-1], kernel.__name__, len(compiled.asm["cubin"]), flush=True)


if __name__ == "__main__":
    compile_for(int(sys.argv[1]))
