# SPDX-License-Identifier: Apache-2.0
"""Keys and values of all layers in pages, written a step at a time; a step of drafts is kept in part."""

import torch
from flashmask import append_kv, flashmask_with_kvcache
from flashmask.inference import CachePlan, KvCache, SequenceMask

PAGE_SIZE = 16


class PagedCache:
    """One table and one plan for all layers. A step: begin(), attend() in each layer, and for drafts keep()."""

    def __init__(self, layers, batch, most_tokens, most_rows, heads, heads_kv, head_dim, dtype, device):
        pages = -(-most_tokens // PAGE_SIZE)
        shape = layers, 2, batch * pages, PAGE_SIZE, heads_kv, head_dim
        table = torch.randperm(batch * pages, device=device, dtype=torch.int32).view(batch, pages)
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.layers = [KvCache(k, v, table, self.seqlens) for k, v in torch.zeros(shape, dtype=dtype, device=device)]
        self.plan = CachePlan(batch, most_rows, most_tokens, heads, heads_kv, head_dim, device=device)
        self._drafts = None

    def begin(self, counts: torch.Tensor, mask: SequenceMask | None = None) -> None:
        """Begins a step of counts[b] new tokens of each request, the last of its sequence. mask: None: causal."""
        self.seqlens += counts
        self._mask, self._ends = mask, ends_of(counts)
        self.plan.update(mask, self.layers[0], self._ends)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes the step's keys and values, [rows, heads_kv, head_dim], and attends over all of each request."""
        cache = self.layers[layer]
        append_kv(k, v, cache, cu_seqlens=self._ends)
        if self._drafts is not None:
            self._drafts[layer].append([x.unflatten(0, (len(self.seqlens), -1)) for x in (k, v)])
        return flashmask_with_kvcache(q, cache, self._mask, self.plan, self._ends)

    def begin_drafts(self) -> None:
        """From here to keep(), steps are of drafts: the same number for each request."""
        self._drafts, self._sure = [[] for _ in self.layers], self.seqlens.clone()

    def keep(self, paths: list[list[int]]) -> None:
        """Keeps these drafts of each request in this order, as if no others had come."""
        counts = torch.tensor([len(path) for path in paths], dtype=torch.int32, device=self.seqlens.device)
        self.seqlens.copy_(self._sure + counts)
        request = torch.arange(len(paths), device=counts.device).repeat_interleave(counts)
        draft = torch.tensor([n for path in paths for n in path], dtype=torch.long, device=counts.device)
        for cache, steps in zip(self.layers, self._drafts):
            k, v = (torch.cat(parts, dim=1)[request, draft] for parts in zip(*steps))
            append_kv(k, v, cache, cu_seqlens=ends_of(counts))
        self._drafts = None


def ends_of(counts):
    """cu_seqlens: 0, then the sums of counts."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
