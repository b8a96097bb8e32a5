# SPDX-License-Identifier: Apache-2.0
"""Builders of masks: the families of the C++ library, from tensors on any device.

i is a query row, j a key. Every builder is one call of an operator, which builds where its tensors are:
it waits for no device and can be traced by torch.compile. The exceptions are from_dense, intersect and concatenate,
which read their arguments, and bigbird, dilated and neighborhood_2d, whose interval lists are made in host memory.
Integers may be lists or tensors; lists go to `device`, by default torch's default device. If an argument is [..., n],
its leading dimensions are the mask's batch and heads.

Values in host memory are checked; a wrong one, or a document beyond `seqlen`, is a ValueError. Values on a device are
not read; wrong values make a wrong but harmless mask. The exceptions are hash_sparse, prefix_tree and block_diffusion's
order "concatenated", whose check stays in the device's work (torch's asynchronous assertion).

Documents are packed one after the other, and given as exactly one of
    cu_seqlens    [..., documents + 1]  0, then the end of each document
    seqlens       [..., documents]      their lengths; 0 is legal
    doc_ids       [..., seqlen]         an id per token; a run of equal ids is a document, and an id must not come back
    position_ids  [..., seqlen]         a position per token; a document begins wherever it is not the one before plus 1
With cu_seqlens and seqlens, `seqlen` is the length of the mask. It may be left out if the lengths are in host memory,
and is then their sum. If it is more, the tokens past the last document see nothing and are not seen.
"""

from __future__ import annotations

import torch

from ._core import arguments
from ._core.docstrings import composed
from ._core.families import Builders
from .torch import mask_builders, mask_forms
from .torch.annotations import Device
from .torch.draft_trees import draft_tree, tail_from_dense
from .torch.mask import Mask
from .torch.mask_composition import concatenate, crop, intersect

__all__ = [
    "attention_sink_window",
    "bigbird",
    "block_causal",
    "block_diffusion",
    "causal",
    "causal_blockwise",
    "causal_document",
    "causal_with_blocks",
    "concatenate",
    "crop",
    "dflash",
    "dilated",
    "dilated_window",
    "document",
    "draft_tree",
    "eagle3_ttt",
    "eviction",
    "from_dense",
    "from_startend",
    "full",
    "global_sliding_window",
    "hash_sparse",
    "intersect",
    "neighborhood_2d",
    "padding",
    "prefix_lm_causal",
    "prefix_lm_document",
    "prefix_tree",
    "prefix_tree_from_intervals",
    "qk_sparse",
    "random_eviction",
    "shared_question",
    "sliding_window",
    "tail_from_dense",
]

_builders = Builders[Mask, torch.Tensor](mask_builders)
attention_sink_window = _builders.attention_sink_window
bigbird = _builders.bigbird
block_causal = _builders.block_causal
block_diffusion = _builders.block_diffusion
causal = _builders.causal
causal_blockwise = _builders.causal_blockwise
causal_document = _builders.causal_document
causal_with_blocks = _builders.causal_with_blocks
dflash = _builders.dflash
dilated = _builders.dilated
dilated_window = _builders.dilated_window
document = _builders.document
eagle3_ttt = _builders.eagle3_ttt
eviction = _builders.eviction
full = _builders.full
global_sliding_window = _builders.global_sliding_window
hash_sparse = _builders.hash_sparse
neighborhood_2d = _builders.neighborhood_2d
padding = _builders.padding
prefix_lm_causal = _builders.prefix_lm_causal
prefix_lm_document = _builders.prefix_lm_document
prefix_tree = _builders.prefix_tree
prefix_tree_from_intervals = _builders.prefix_tree_from_intervals
qk_sparse = _builders.qk_sparse
shared_question = _builders.shared_question
sliding_window = _builders.sliding_window


def random_eviction(seqlen: int, seed: int = 0, *, device: Device | None = None) -> Mask:
    """A seeded `eviction`: from row seqlen // 2 on, each row evicts one more of the remaining keys before it.

    The same seed draws the same keys on every device. They are not those of the C++ library's generator.
    """
    seqlen, seed = arguments.length("seqlen", seqlen), arguments.integer("seed", seed, -(2**63), 2**63 - 1)
    kept = seqlen // 2  # keys that are there at any row from the middle on
    key = torch.arange(seqlen, device=device)
    if kept == 0:
        return eviction(torch.full_like(key, seqlen))
    # The keys that are there sit in as many slots. A row evicts the one in a random slot and puts its own key there, so
    # a key is evicted at the next row that draws the same slot.
    slot = torch.where(key < kept, key, _random_bits(key, seed) % kept)
    by_slot = slot.argsort(stable=True)
    drawn_again = torch.zeros_like(key, dtype=torch.bool)
    drawn_again[:-1] = slot[by_slot[1:]] == slot[by_slot[:-1]]
    evicted_at = torch.where(drawn_again, by_slot.roll(-1), seqlen)
    return eviction(torch.empty_like(key).scatter_(0, by_slot, evicted_at))


def _random_bits(counter: torch.Tensor, seed: int) -> torch.Tensor:
    """63 random bits for each counter: splitmix64 in wrapping int64 arithmetic, the same on every device."""

    def signed(constant: int) -> int:
        return constant - (1 << 64) if constant >= 1 << 63 else constant

    def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
        return (x >> by) & ((1 << (64 - by)) - 1)

    x = counter * signed(0x9E3779B97F4A7C15) + signed((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % (1 << 64))
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    return shifted(x ^ shifted(x, 31), 1)


def from_startend(
    startend_row_indices: torch.Tensor, causal: bool = False, seqlen_q: int | None = None, q_offset: int | None = None
) -> Mask:
    """The mask of FlashMask's startend_row_indices under its `causal` flag.

    startend_row_indices: int32 or int64 [batch, heads, seqlen_k, n], see Mask.bounds. seqlen_q: default seqlen_k.
    q_offset: default seqlen_k - seqlen_q.
    """
    if not isinstance(startend_row_indices, torch.Tensor) or startend_row_indices.ndim != 4:
        got = arguments.describe(startend_row_indices)
        raise ValueError(f"startend_row_indices is {got}; it must be a tensor [batch, heads, seqlen_k, n]")
    seqlen_k = startend_row_indices.shape[2]
    return Mask(
        seqlen_k if seqlen_q is None else seqlen_q,
        seqlen_k,
        bounds=startend_row_indices,
        causal=causal,
        q_offset=q_offset,
    )


@composed
def from_dense(visible: torch.Tensor) -> Mask:
    """
    {from_dense}

    Reads the matrix, so on a GPU it waits for it, and torch.compile cannot trace it.
    """
    arguments.check_matrix(visible, isinstance(visible, torch.Tensor) and visible.dtype in (torch.bool, torch.uint8))
    return Mask(**mask_forms.from_dense(visible if visible.ndim == 4 else visible[None, None]))
