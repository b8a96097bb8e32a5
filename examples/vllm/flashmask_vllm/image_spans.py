# SPDX-License-Identifier: Apache-2.0
"""Image spans of prefix LMs (vLLM's mm_prefix_range) as the vectors of a SequenceMask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from flashmask.inference import SequenceMask
from vllm.v1.attention.backend import CommonAttentionMetadata

# The first and last token of each span, by the request's place in the batch.
Spans: TypeAlias = "Mapping[int, Sequence[tuple[int, int]]]"

_FOR_GOOD = 2**31 - 1


def step_spans(step: CommonAttentionMetadata) -> Spans | None:
    """Spans that have rows in this step, None if there are none: other spans change nothing that its rows see.

    Reads lengths that the host has. Where only their upper bound is known, requests decode, past all spans.

    Neither does a step of single rows need spans: the keys after a row are not in the cache yet, and vLLM leaves out
    spans longer than the window that do not end at it. So such a step may replay a graph captured without spans.
    """
    given = step.mm_req_doc_ranges
    if not given or step.max_query_len == 1:
        return None
    starts = step.query_start_loc_cpu.tolist()
    assert step.seq_lens_cpu_upper_bound is not None, "vLLM gives these lengths where it gives spans"
    ends = step.seq_lens_cpu_upper_bound.tolist()
    found = {}
    for request, spans in given.items():
        begin = ends[request] - (starts[request + 1] - starts[request])
        live = [(a, b) for a, b in spans if b >= begin and a < ends[request]]
        if live:
            found[request] = live
    return found or None


def span_mask(
    spans: Spans, batch: int, keys: int, window: int | None, ends_at_window: bool, device: torch.device
) -> SequenceMask:
    """Row i sees key j if j <= i < j + window, or if both lie in one span; a span that ends at the window shows no key
    to rows from j + window on.

    So a key's rows are one interval. keys: as many as the longest sequence has. window: None is unlimited.
    """
    key = torch.arange(keys, dtype=torch.int32, device=device)
    end = torch.full_like(key, _FOR_GOOD) if window is None else key + window
    bounds = torch.stack((end, key), dim=-1).repeat(batch, 1, 1)
    for request, of_request in spans.items():
        for first, last in of_request:
            lts, ute = bounds[request, first : last + 1].unbind(-1)
            ute.fill_(first)
            if not ends_at_window:
                lts.clamp_(min=last + 1)
    return SequenceMask(causal=False, bounds=bounds[:, None], key_layout="sequences")
