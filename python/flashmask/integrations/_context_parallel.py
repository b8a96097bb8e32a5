# SPDX-License-Identifier: Apache-2.0
"""Calls of a model on the rows of one rank, whose attention looks beyond them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._core import arguments
from ..context_parallel import LocalMask, Placement, attention, messages
from ..context_parallel.attention import Way
from ..torch import tensor_arguments
from ..torch.mask import Mask

_IGNORED = -100  # label of a token that is not to be predicted, transformers' and torch's


@dataclass(frozen=True)
class RankMask:
    """A rank's part of a mask where a Mask of all rows would be, and how its attention is computed."""

    local: LocalMask
    group: Any
    way: Way

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attention of [batch, heads, rows, head_dim]: [batch, rows, heads, head_dim_v]."""
        of_rows = (x.transpose(1, 2) for x in (query, key, value))
        return attention(*of_rows, self.local, group=self.group, way=self.way, **options)


class ContextParallel:
    """Calls of models with registered attention, each rank of a group on its own rows of the sequences.

        parallel = ContextParallel(place(mask, world_size), group)
        loss = model(**parallel.inputs(input_ids, labels=labels)).loss

    The model itself is unchanged, whatever checkpoints or shards it: the rank's mask is an argument of the call. All
    ranks of the group call the model, and the backward. docs/context-parallel.md says what that costs.
    """

    def __init__(
        self, placement: Placement, group: Any = None, *, layer_types: Sequence[str] | None = None, way: Way = "auto"
    ) -> None:
        """
        Args:
            placement: flashmask.context_parallel.place(mask, ranks of the group), of the whole mask: it replaces what
                the model would make of padding, positions and windows. Of several masks for layers of several kinds.
            group: the process group, its ranks in the placement's order; None: the default one.
            layer_types: the kinds of layers (`config.layer_types`) that the placement's masks are for, in its order;
                None: its one mask is for all layers.
            way: as in flashmask.context_parallel.attention.

        Raises TypeError or ValueError naming the argument that is wrong.
        """
        if not isinstance(placement, Placement):
            raise TypeError(
                f"placement is a {type(placement).__name__}; it must be one that context_parallel.place makes"
            )
        kinds, masks = 1 if layer_types is None else len(layer_types), len(placement.masks)
        if kinds != masks:
            raise ValueError(
                f"layer_types is {arguments.describe(layer_types)} and the placement has {masks} masks; each must be "
                "for one kind of layer (None: one mask for all)"
            )
        size, self.rank = messages.size_and_rank(group)
        if size != placement.world_size:
            raise ValueError(f"group has {size} ranks; the placement is for {placement.world_size}")
        self.placement, self.group = placement, group
        self._layer_types, self._way = layer_types, way
        self._masks: dict[torch.device, Any] = {}

    def inputs(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Arguments of the model's call for this rank's rows of whole sequences, which all ranks give alike.

        input_ids: [batch, seqlen]. labels: likewise, of the tokens themselves, as transformers takes them, with -100
        for those that are not to be predicted; they are shifted before they are sharded. position_ids: [batch or 1,
        seqlen]; None: places in the sequence.

        With labels the model's loss is the rank's share of the mean over all labels of the sequences: the sum over the
        ranks is the loss, and so it is with gradients. `num_items_in_batch` says by what it is divided; where several
        groups have other sequences, put the number of all of them there.
        """
        tensor_arguments.check_tensors("[batch, seqlen]", input_ids=input_ids)
        placement, rank, device = self.placement, self.rank, input_ids.device
        if position_ids is None:
            position_ids = torch.arange(placement.seqlen, device=device)[None]
        rows = placement.rows(rank)
        given = {
            "input_ids": placement.shard(input_ids, rank),
            "position_ids": placement.shard(position_ids, rank),
            "attention_mask": Mask(rows, rows),  # so that transformers makes none
            "mask": self._mask(device),
            "use_cache": False,
        }
        if labels is not None:
            following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
            targets = placement.shard(following, rank)
            # transformers asks for `labels` to have a loss, and takes it from the other.
            given |= {"labels": targets, "shift_labels": targets, "num_items_in_batch": (following != _IGNORED).sum()}
        return given

    def _mask(self, device):
        if device not in self._masks:
            made = [
                RankMask(self.placement.mask(self.rank, n).to(device), self.group, self._way)
                for n in range(len(self.placement.masks))
            ]
            self._masks[device] = made[0] if self._layer_types is None else dict(zip(self._layer_types, made))
        return self._masks[device]
