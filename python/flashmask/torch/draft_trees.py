# SPDX-License-Identifier: Apache-2.0
"""Trees of drafts as the tail of a SequenceMask."""

from __future__ import annotations

import torch

from .._core import arguments
from . import tensor_arguments

MOST_DRAFTS = 128


def draft_tree(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tail, depth) of trees of drafts, for SequenceMask(tail=, tail_depth=).

    parents: integers [batch, T] or [T], the draft that each draft follows, or -1 for a root; T <= 128. Each draft sees
    itself and the drafts that it follows, and is as far from the sequence as it has such. Entries out of range are
    roots; a cycle gives bits that are wrong but harmless.

    tail: int32 [batch, T, ceil(T / 32)]; depth: int32 [batch, T]. On parents' device, without waiting for it.

    Raises TypeError or ValueError if parents is no such tensor.
    """
    parents = _batched(tensor_arguments.integers("parents", parents, shape="[batch, T] or [T]"))
    count = parents.shape[1]
    _check_count("parents", parents.shape, count)
    # Node T stands for the sequence: it is its own parent, and is seen by none.
    parents = torch.where((parents < 0) | (parents >= count), count, parents).long()
    parents = torch.nn.functional.pad(parents, (0, 1), value=count)
    seen = torch.eye(count + 1, dtype=torch.bool, device=parents.device).repeat(parents.shape[0], 1, 1)
    for _ in range(max(count, 1).bit_length()):
        # Twice as many generations: what a node sees, and what the one beyond them does.
        seen = seen | seen.gather(1, parents[..., None].expand_as(seen))
        parents = parents.gather(1, parents)
    visible = seen[:, :count, :count]
    return tail_from_dense(visible), (visible.sum(-1) - 1).to(torch.int32)


def tail_from_dense(visible: torch.Tensor) -> torch.Tensor:
    """The tail of a SequenceMask: int32 [batch, T, ceil(T / 32)], where bit u % 32 of word u / 32 says if row t sees u.

    visible: bool or integers [batch, T, T] or [T, T], T <= 128. On visible's device, without waiting for it.
    """
    tensor_arguments.check_dense("visible", visible, "[batch, T, T] or [T, T]")
    visible = visible[None] if visible.ndim == 2 else visible
    arguments.check_dimensions("visible", visible.shape, "[batch, T, T]")
    count = visible.shape[2]
    _check_count("visible", visible.shape, count)
    if visible.shape[1] != count:
        raise ValueError(f"visible has shape {list(visible.shape)}; it must be [batch, T, T]")
    words = (count + 31) // 32
    bits = torch.nn.functional.pad((visible != 0).to(torch.int64), (0, words * 32 - count))
    bits = bits.view(*visible.shape[:2], words, 32)
    packed = (bits << torch.arange(32, device=bits.device)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _batched(parents: torch.Tensor) -> torch.Tensor:
    parents = parents[None] if parents.ndim == 1 else parents
    arguments.check_dimensions("parents", parents.shape, "[batch, T]")
    return parents


def _check_count(name: str, shape: torch.Size, count: int) -> None:
    if count > MOST_DRAFTS:
        raise ValueError(f"{name} has shape {list(shape)}; T must be at most {MOST_DRAFTS}")
