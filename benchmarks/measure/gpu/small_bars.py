# SPDX-License-Identifier: Apache-2.0
"""The bars of small problems."""

from benchmarks.cell_bars import check_at_most

CUDNN, FLEX = ("cudnn", "cuDNN"), ("flex", "FlexAttention")
# {op: {mask: (peer, the most that our time over its may be)}}
OVER_PEERS = {"fwd": {"causal": (CUDNN, 1.0), "causal_document": (FLEX, 0.7)}, "bwd": {"causal": (CUDNN, 1.0)}}
DIRECTIONS = {"fwd": "forward", "bwd": "forward and backward"}
# {op: {(mask, heads, seqlen, head_dim): microseconds by the C interface}}
MICROSECONDS = {"bwd": {("causal", 8, 2048, 128): 80, ("causal", 8, 2048, 64): 57}}


def of_cell(cell, op):
    mask, heads, seqlen, head_dim = (cell[name] for name in ("mask", "heads", "seqlen", "head_dim"))
    place, found = f"{mask} d={head_dim}, {heads} x {seqlen}", []
    if mask in OVER_PEERS[op]:
        (peer, name), bar = OVER_PEERS[op][mask]
        found.append(check_at_most(f"{place}: {DIRECTIONS[op]}, time over {name}'s", cell["ours_over"][peer], bar))
    if bar := MICROSECONDS.get(op, {}).get((mask, heads, seqlen, head_dim)):
        found.append(check_at_most(f"{place}: {DIRECTIONS[op]}, microseconds", cell["us"]["ours"], bar))
    return found


def of_all(figures):
    """All bars of a receipt's figures."""
    return [found for cell in figures["cells"] for found in of_cell(cell, figures["op"])]
