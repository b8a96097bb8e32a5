# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of flashmask_attention would do, as text."""

from __future__ import annotations

from typing import Any

import torch

from .._core import capi, explanation
from .._core.call_options import TENSORS
from .._core.docstrings import composed
from .._core.signatures import takes_arguments_of
from . import ops, tensor_arguments
from .attention import call_mask, flashmask_attention, options_by_name
from .dropout import read_as_paddle

__all__ = ["explain"]


@composed
@takes_arguments_of(flashmask_attention)
def explain(given: dict[str, Any]) -> str:
    """
    {explain}

    Makes the mask's plan, if it has none yet.
    """
    return explanation.explain(lambda: _described_call(**given))


def _described_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_softmax_lse: bool,
    return_seed_offset: bool,
    **others: Any,
) -> explanation.Described:
    of_dropout = ("dropout", "dropout_state", "fixed_seed_offset", "rng_name", "training")
    p, state = read_as_paddle(query, **{name: others.pop(name) for name in of_dropout}, return_seed_offset=False)
    of_mask = "startend_row_indices causal window_size q_offset block_mask layout q_pos k_pos".split()
    band = {name: others.pop(name) for name in of_mask}
    options = options_by_name(query, p, state, **others)
    mask = call_mask(query, key, value, **band)
    tensors = {option.name: options.get(option.name) for option in TENSORS}
    if mask.device not in (None, query.device):
        raise ValueError(f"the mask is on {mask.device} and query on {query.device}; move it: mask.to(query.device)")
    tensor_arguments.check_one_device(query=query, dropout_state=state, **tensors)
    q, k, v = (x.transpose(1, 2) if band["layout"] == "bhsd" else x for x in ops.autocast(query, key, value))
    options |= {name: x if x is None else _described(x) for name, x in tensors.items()} | place_of(query.device)
    call = explanation.Call(
        _described(q),
        _described(k),
        _described(v),
        needs_gradient=any(x is not None and x.requires_grad for x in (q, k, v, *tensors.values())),
        options=options,
    )
    fm_mask, plan = capi.mask_of(mask, lambda name, x: _described(x).described(name)), mask.plan(query.device)
    stats = mask.stats()
    tiles = explanation.Tiles(stats.full_tiles, stats.partial_tiles, stats.empty_tiles)
    return explanation.Described(call, mask, fm_mask, tiles, (plan.data_ptr(), plan.numel()), plan)


def _described(x: torch.Tensor) -> explanation.Array:
    pointer = None if x.is_meta else x.data_ptr()
    return explanation.Array(tuple(x.shape), capi.dtype_name(x.dtype), str(x.device), x.stride(), pointer)


def place_of(device: torch.device) -> dict[str, Any]:
    """Fields of fm_options that name a device."""
    if device.type == "cpu":
        return {"threads": torch.get_num_threads()}
    if device.type != "cuda":
        raise ValueError(f"query is on {device}; it must be on the CPU or a CUDA device, where calls run")
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"device": capi.cuda_device(index), "stream": torch.cuda.current_stream(device).cuda_stream}
