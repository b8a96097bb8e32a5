# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's kernels over paged KV caches: its own on tensor cores (fa2), with the plan made beforehand, and XQA.

The package is the installed one, or lies in `site` of the folder of peers. It compiles a module for every shape; here
it only loads those that it finds compiled, in flashinfer/data/aot/NAME/NAME.so or in its cache.
"""

import functools
import importlib
import os
import sys

import torch

from benchmarks.peers import LeftOut, folder

WORKSPACE_BYTES, SEMAPHORE_BYTES = 512 << 20, 8 << 20
BIT = tuple(1 << n for n in range(8))


def load_built(spec):
    """In place of JitSpec.build_and_load."""
    path = spec.get_library_path()
    if not path.exists():
        raise LeftOut(f"there is no {spec.name}.so")
    return spec.load(path)


@functools.cache
def load():
    """Its modules decode and prefill, and its function xqa."""
    sys.path.append(str(folder() / "site"))
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(folder()))  # else it writes into the home folder
    try:
        names = ("decode", "prefill", "xqa", "jit.core")
        decode, prefill, xqa, core = (importlib.import_module(f"flashinfer.{name}") for name in names)
    except (ImportError, OSError, RuntimeError) as error:
        raise LeftOut(f"flashinfer is not imported: {str(error)[:200]}") from error
    core.JitSpec.build_and_load = load_built
    return decode, prefill, xqa.xqa


@functools.cache
def workspace():
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@functools.cache
def semaphores():
    return torch.zeros(SEMAPHORE_BYTES, dtype=torch.uint8, device="cuda")


def starts(count, step):
    """Begins of `count` parts, and the last one's end; on the host, where plans want them."""
    return torch.arange(count + 1, dtype=torch.int32) * step


def visible(cell, tail):
    """bool [batch, rows, keys] of a tree, int32 [batch, rows, words of 32 bits] among the last rows and keys."""
    bits = torch.arange(cell.rows, device=tail.device)
    found = torch.ones(cell.batch, cell.rows, cell.keys, dtype=torch.bool, device=tail.device)
    found[:, :, -cell.rows :] = (tail[..., bits // 32] >> bits % 32 & 1).bool()
    return found


def packed(mask):
    """uint8 bits of a mask, the first key lowest; a request has a multiple of 8."""
    weights = torch.tensor(BIT, dtype=torch.int32, device=mask.device)
    return (mask.view(-1, 8).int() * weights).sum(-1).to(torch.uint8)


def causal_tail(cell):
    """The tail of rows of which each sees those before it."""
    row = torch.arange(cell.rows, device=cell.q.device)
    seen = (row[:, None] + 1 - row[::32]).clamp(0, 32)  # of the rows in a word
    return (2**seen - 1).int().repeat(cell.batch, 1, 1)


class Decode:
    """A call on cache n of a cell (benchmarks/measure/gpu/decode_cell.py). `mask`: the tail of a tree."""

    def __init__(self, cell, mask=None):
        if not cell.page:
            raise LeftOut("it takes pages alone")
        decode, prefill, _ = load()
        self.cell, self.out = cell, torch.empty_like(cell.q)
        pages = cell.tables[0].shape[1]
        last = torch.full((cell.batch,), (cell.keys - 1) % cell.page + 1, dtype=torch.int32)
        self.indices = [table.view(-1) for table in cell.tables]
        caches = starts(cell.batch, pages), self.indices[0], last
        shape = cell.heads_q, cell.heads_kv, cell.dim, cell.page
        dtypes = dict.fromkeys(("q_data_type", "o_data_type"), cell.q.dtype) | {"kv_data_type": cell.k.dtype}
        if cell.rows == 1:
            self.wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(
                workspace(), "NHD", use_tensor_cores=True, backend="fa2"
            )
            self.wrapper.plan(*caches, *shape, **dtypes)
            return
        self.wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="fa2")
        rows = starts(cell.batch, cell.rows)
        if mask is None:
            self.wrapper.plan(rows, *caches, *shape, **dtypes, causal=True)
            return
        bits = packed(visible(cell, mask))
        self.wrapper.plan(rows, *caches, *shape, **dtypes, packed_custom_mask=bits)
        # The plan counts elements here, and its kernels read bytes.
        self.wrapper._mask_indptr_buf = starts(cell.batch, cell.rows * cell.keys // 8).to(bits.device)

    def __call__(self, n):
        q, out = (x.view(-1, self.cell.heads_q, self.cell.dim) for x in (self.cell.q, self.out))
        self.wrapper._paged_kv_indices_buf = self.indices[n]  # caches are alike: the plan is of them all
        self.wrapper.run(q, (self.cell.k, self.cell.v), out=out)
        return self.out


def cascades():
    """Its module of attention in levels."""
    load()
    return importlib.import_module("flashinfer.cascade")


class Cascade:
    """A call on cache n of a cell whose requests share their first keys: a level of these, and one of the others."""

    def __init__(self, cell, shared_keys):
        self.cell, self.wrappers = cell, []
        shared, pages = shared_keys // cell.page, cell.tables[0].shape[1]
        rows = [starts(1, cell.batch), starts(cell.batch, 1)]
        begins = [starts(1, shared), starts(cell.batch, pages - shared)]
        last = [torch.full((n,), cell.page, dtype=torch.int32) for n in (1, cell.batch)]
        last[1].fill_((cell.keys - 1) % cell.page + 1)
        for table in cell.tables:
            wrapper = cascades().MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD")
            for level in wrapper._batch_prefill_wrappers:
                level._backend = "fa2"
            indices = [table[0, :shared].contiguous(), table[:, shared:].flatten()]
            sizes = cell.heads_q, cell.heads_kv, cell.dim, cell.page
            dtypes = {"q_data_type": cell.q.dtype, "kv_data_type": cell.k.dtype}
            wrapper.plan(rows, begins, indices, last, *sizes, **dtypes)
            self.wrappers.append(wrapper)

    def __call__(self, n):
        return self.wrappers[n].run(self.cell.q[:, 0], (self.cell.k, self.cell.v)).view_as(self.cell.q)


class Xqa:
    """Likewise, by XQA."""

    PAGES = (16, 32, 64, 128)

    def __init__(self, cell, mask=None):
        if cell.page not in self.PAGES:
            raise LeftOut(f"it takes pages of {', '.join(map(str, self.PAGES))}")
        self.cell, self.out, self.call = cell, torch.empty_like(cell.q), load()[2]
        self.lengths, self.mask = cell.lengths.view(-1, 1).view(torch.uint32), None
        if cell.rows > 1:
            self.mask = (causal_tail(cell) if mask is None else mask).contiguous().view(torch.uint16)  # halves of words
        rows = () if cell.rows == 1 else (cell.rows,)
        self.shape = cell.batch, 1, *rows, cell.heads_q, cell.dim
        semaphores().zero_()

    def __call__(self, n):
        cell = self.cell
        tensors = cell.q.view(self.shape), cell.k, cell.v, cell.tables[n], self.lengths, self.out.view(self.shape)
        self.call(
            *tensors, workspace(), semaphores(), cell.heads_kv, cell.page, q_seq_len=cell.rows, mask=self.mask
        )  # fmt: skip
        return self.out
