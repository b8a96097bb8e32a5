# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of flashmask_attention would do, as text."""

from __future__ import annotations

from typing import Any

import torch

from .._core import capi, explanation
from .._core.annotations import Backend, Layout, Window
from .._core.docstrings import composed
from . import ops, tensor_arguments
from .annotations import Startend
from .attention import call_mask, read_features
from .dropout import read_as_paddle

__all__ = ["explain"]


@composed
def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    startend_row_indices: Startend | None = None,
    *,
    causal: bool = False,
    window_size: Window = None,
    q_offset: int | None = None,
    softmax_scale: float | None = None,
    block_mask: torch.Tensor | None = None,
    deterministic: bool | None = None,
    layout: Layout = "bshd",
    dropout: float = 0.0,
    return_softmax_lse: bool = False,
    backend: Backend = "auto",
    max_ctas: int = 0,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    q_pos: torch.Tensor | None = None,
    k_pos: torch.Tensor | None = None,
    dropout_state: torch.Tensor | None = None,
    fixed_seed_offset: torch.Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    return_seed_offset: bool = False,
) -> str:
    """
    {explain}

    Makes the mask's plan, if it has none yet.
    """

    def prepare() -> explanation.Described:
        p, given = read_as_paddle(query, dropout, dropout_state, fixed_seed_offset, rng_name, training, False)
        state = torch.zeros(2, dtype=torch.int64, device=query.device) if given is None else given  # none is drawn
        features = read_features(query, p, state, softcap, sink)
        mask = call_mask(
            query, key, value, startend_row_indices, causal, window_size, q_offset, block_mask, layout, q_pos, k_pos
        )
        if mask.device not in (None, query.device):
            raise ValueError(
                f"the mask is on {mask.device} and query on {query.device}; move it: mask.to(query.device)"
            )
        tensor_arguments.check_one_device(query=query, sink=sink, dropout_state=given)
        scale, is_deterministic, ctas = ops.read_options(softmax_scale, deterministic, backend, max_ctas)
        tensors = [x.transpose(1, 2) if layout == "bhsd" else x for x in ops.autocast(query, key, value)]
        q, k, v = map(_described, tensors)
        call = explanation.Call(
            q,
            k,
            v,
            backend=backend,
            deterministic=torch.are_deterministic_algorithms_enabled()
            if is_deterministic is None
            else is_deterministic,
            softmax_scale=scale,
            needs_gradient=any(x.requires_grad for x in (*tensors, *(x for x in (sink,) if x is not None))),
            max_ctas=ctas,
            softcap=features[-1] if features else 0.0,
            dropout_p=features[-2] if features else 0.0,
            sink=None if sink is None else _described(sink),
            **_place(query.device),
        )
        fm_mask, plan = capi.mask_of(mask, lambda name, x: _described(x).described(name)), mask.plan(query.device)
        stats = mask.stats()
        tiles = explanation.Tiles(stats.full_tiles, stats.partial_tiles, stats.empty_tiles)
        return explanation.Described(call, mask, fm_mask, tiles, (plan.data_ptr(), plan.numel()), plan)

    return explanation.explain(prepare)


def _described(x: torch.Tensor) -> explanation.Array:
    pointer = None if x.is_meta else x.data_ptr()
    return explanation.Array(tuple(x.shape), capi.dtype_name(x.dtype), str(x.device), x.stride(), pointer)


def _place(device: torch.device) -> dict[str, Any]:
    """What fm_options says of a device."""
    if device.type == "cpu":
        return {"threads": torch.get_num_threads()}
    if device.type != "cuda":
        raise ValueError(f"query is on {device}; it must be on the CPU or a CUDA device, where calls run")
    index = torch.cuda.current_device() if device.index is None else device.index
    return {"device": capi.cuda_device(index), "stream": torch.cuda.current_stream(device).cuda_stream}
