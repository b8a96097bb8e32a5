# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernel over paged KV caches (unified_attention in v1/attention/ops/ of its wheel), whose images see all
of themselves.

Its Python files lie in `vllm` of the folder of peers: those that the kernel imports, without vllm/__init__.py, which
would change torch.compile for the other contenders.
"""

import functools
import importlib
import sys

import torch

from benchmarks.peers import LeftOut, folder

NO_WINDOW = (-1, -1)


@functools.cache
def load():
    """Its function unified_attention."""
    sys.path.append(str(folder() / "vllm"))
    try:
        platforms = importlib.import_module("vllm.platforms")
        # Keeps it from its platform of CUDA, which loads compiled operators that the kernel does not call.
        platforms.current_platform = platforms.interface.UnspecifiedPlatform()
        return importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    except (ImportError, OSError, RuntimeError) as error:
        raise LeftOut(f"vllm is not imported: {str(error)[:200]}") from error


class Prefill:
    """A causal call on cache n of a cell (benchmarks/measure/gpu/decode_cell.py). `images`: [count, 2], the first and
    the last key of each."""

    def __init__(self, cell, images):
        if not cell.page:
            raise LeftOut("it takes pages alone")
        self.cell, self.call, self.out = cell, load(), torch.empty_like(cell.q)
        self.images = images.int().repeat(cell.batch, 1, 1)
        self.rows = torch.arange(cell.batch + 1, dtype=torch.int32, device=cell.q.device) * cell.rows

    def __call__(self, n):
        cell, (k, v, table) = self.cell, self.cell.cache(n)
        q, out = (x.view(-1, cell.heads_q, cell.dim) for x in (cell.q, self.out))
        self.call(
            *(q, k, v, out, self.rows, cell.rows, cell.lengths, cell.keys),
            softmax_scale=cell.dim**-0.5,
            causal=True,
            window_size=NO_WINDOW,
            block_table=table,
            softcap=0.0,
            **dict.fromkeys(("q_descale", "k_descale", "v_descale")),
            mm_prefix_range=self.images,
        )
        return self.out
