# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 over KV caches, as vLLM builds it (vllm_flash_attn/ of its wheel): operators of PyTorch, called in
the form of flash_attn_with_kvcache, with the metadata made beforehand, as plans are here."""

import functools

import torch

from benchmarks.peers import LeftOut, library

NO_WINDOW = (-1, -1)


@functools.cache
def load():
    try:
        torch.ops.load_library(str(library("fa3_cache")))
    except (OSError, RuntimeError) as error:
        raise LeftOut(f"torch {torch.__version__} does not load it: {str(error)[:200]}") from error
    return torch.ops._vllm_fa3_C


class Decode:
    """A call on cache n of a cell (benchmarks/measure/gpu/decode_cell.py). Over a float8 cache its queries are float8,
    too. `splits`: of each request's keys; 0: as it chooses."""

    def __init__(self, cell, mask=None, splits=0):
        if mask is not None:
            raise LeftOut("it takes no trees")
        self.cell, self.ops, self.out, self.splits = cell, load(), torch.empty_like(cell.q), splits
        self.q = cell.q.to(cell.k.dtype)
        self.causal = cell.rows > 1
        shape = cell.batch, cell.rows, cell.keys, cell.heads_q, cell.heads_kv, cell.dim, cell.dim, self.q.dtype
        page = cell.page or None
        self.metadata = self.ops.get_scheduler_metadata(
            *shape, cell.lengths, *[None] * 5, page, 0, self.causal, *NO_WINDOW, False, splits, None, 0
        )

    def __call__(self, n):
        cell, (k, v, table) = self.cell, self.cell.cache(n)
        longest = cell.keys if cell.page else None  # else it is the tensors' own
        self.ops.fwd(
            *(self.q, k, v, None, None, None, self.out),
            *(None, None, None, None, cell.lengths, None, longest, table),
            *([None] * 8),
            *(
                cell.dim**-0.5,
                self.causal,
                *NO_WINDOW,
                0.0,
                True,
                self.metadata,
                self.splits,
                None,
                0,
                None,
                1,
                0,
                None,
            ),
        )
        return self.out
