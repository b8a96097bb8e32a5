# SPDX-License-Identifier: Apache-2.0
"""explain: what a call of flashmask_attention would do, as text."""

import ctypes as C

import torch

from . import _explain, capi, ops
from .attention import call_mask, refuse_features

__all__ = ["explain"]


def explain(
    query,
    key,
    value,
    startend_row_indices=None,
    *,
    causal=False,
    window_size=None,
    q_offset=None,
    softmax_scale=None,
    block_mask=None,
    deterministic=None,
    layout="bshd",
    dropout=0.0,
    return_softmax_lse=False,
    backend="auto",
    max_ctas=0,
    softcap=0.0,
    sink=None,
    q_pos=None,
    k_pos=None,
):
    """What flashmask_attention would do with these arguments, as text; attention itself is not run.

    Says what the mask is made of, how many tiles of 128 x 128 are full, partial and skipped, which backend and
    configuration takes the call, forward and backward, and, where none does, why, and the least that would have to
    change. A call that would raise is not an error here: the text says why.

    Makes the mask's plan, if it has none yet. On a GPU it waits for the mask's statistics, so it is a tool to look
    with, not a part of a training loop.
    """

    def prepare():
        refuse_features(dropout, softcap, sink, q_pos, k_pos)
        mask = call_mask(query, key, value, startend_row_indices, causal, window_size, q_offset, block_mask, layout)
        if mask.device not in (None, query.device):
            raise ValueError(
                f"the mask is on {mask.device} and query on {query.device}; move it: mask.to(query.device)"
            )
        scale, is_deterministic, ctas = ops.read_options(softmax_scale, deterministic, backend, max_ctas)
        tensors = [x.transpose(1, 2) if layout == "bhsd" else x for x in ops.autocast(query, key, value)]
        call = _explain.Call(
            *map(_described, tensors),
            backend=backend,
            deterministic=torch.are_deterministic_algorithms_enabled()
            if is_deterministic is None
            else is_deterministic,
            softmax_scale=scale,
            needs_gradient=any(x.requires_grad for x in tensors),
            max_ctas=ctas,
            **_place(query.device),
        )
        fm_mask = capi.mask_of(mask, lambda name, x: _described(x).described())
        return call, mask, fm_mask, _plan(mask, query.device)

    return _explain.explain(prepare)


def _described(x):
    pointer = None if x.is_meta else x.data_ptr()
    return _explain.Array(tuple(x.shape), capi.dtype_name(x.dtype), str(x.device), x.stride(), pointer)


def _plan(mask, device):
    plan = mask.plan(device)
    host = plan.cpu()
    return _explain.Plan(plan.data_ptr(), C.string_at(host.data_ptr(), host.numel()))


def _place(device):
    """What fm_options says of a device."""
    if device.type == "cpu":
        return {"threads": torch.get_num_threads()}
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    return {"device": capi.cuda_device(index), "stream": stream}
