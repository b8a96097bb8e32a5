# SPDX-License-Identifier: Apache-2.0
"""Time to build the vectors of one mask of 131,072 columns, for each family and form of parameters.

    python -m benchmarks.measure.mask_build    on one core of the host
    scripts/gpu-check masks                    on a GPU

The parameters are int64 and checked, as they are by default. FLASHMASK_LIBRARY names the library.
"""

import ctypes as C
import statistics
import time

import numpy as np

COLUMNS = 131072
CALLS = 50
FEW, MANY = 12, 4000  # documents


def lengths(rng, count, total):
    cuts = np.sort(rng.choice(np.arange(1, total), count - 1, replace=False))
    return np.diff(np.concatenate([[0], cuts, [total]]))


def any_tree(rng, nodes):
    """Parents in depth-first order; half of the nodes are the child of the one before."""
    parents = [-1]
    for node in range(1, nodes):
        parent = node - 1
        while parent > 0 and rng.random() < 0.5:
            parent = parents[parent]
        parents.append(parent)
    return np.array(parents)


def cases(columns=COLUMNS):
    """{name: (family, vectors, numbers)}."""
    rng, half, tokens = np.random.default_rng(0), columns // 2, np.arange(columns)
    few, many = lengths(rng, FEW, columns), lengths(rng, MANY, columns)
    ids, many_ids = (np.repeat(np.arange(len(x)), x) for x in (few, many))
    positions = np.concatenate([np.arange(x) for x in many])
    few_half, few_quarter = lengths(rng, FEW, half), lengths(rng, FEW, columns // 4)
    buckets, sorted_buckets = rng.integers(0, 16, columns), np.sort(rng.integers(0, 16, columns))
    block_ids = np.where(tokens % 40 < 10, tokens // 40, -1)
    seqlen = {"seqlen": columns}
    windowed = {"window": 4096}
    return {
        "causal_document, lengths": ("causal_document", {"seqlens": many}, seqlen),
        "causal_document, cu_seqlens": ("causal_document", {"cu_seqlens": np.append(0, np.cumsum(many))}, seqlen),
        "causal_document, few ids": ("causal_document", {"doc_ids": ids}, {}),
        "causal_document, ids": ("causal_document", {"doc_ids": many_ids}, {}),
        "causal_document, positions": ("causal_document", {"position_ids": positions}, {}),
        "document, ids": ("document", {"doc_ids": many_ids}, {}),
        "causal_blockwise, ids": ("causal_blockwise", {"doc_ids": many_ids}, {}),
        "prefix_lm_document": ("prefix_lm_document", {"doc_ids": many_ids, "prefix": many // 3}, {}),
        "prefix_lm_causal": ("prefix_lm_causal", {"prefix": np.array([half])}, seqlen),
        "shared_question": ("shared_question", {"seqlens": many, "is_question": np.arange(MANY) % 5 == 0}, seqlen),
        "global_sliding_window": ("global_sliding_window", {}, {**seqlen, **windowed, "global_tokens": 16}),
        "qk_sparse": ("qk_sparse", {"dropped": np.array([[1000, 2000], [3000, half]])}, seqlen),
        "eviction": ("eviction", {"evicted_at": rng.integers(0, columns, columns)}, {}),
        "hash_sparse": ("hash_sparse", {"query_buckets": sorted_buckets, "key_buckets": buckets}, {"causal": 1}),
        "hash_sparse, many": ("hash_sparse", {"query_buckets": many_ids, "key_buckets": many_ids[::-1]}, {"causal": 0}),
        "prefix_tree": ("prefix_tree", {"parents": any_tree(rng, MANY), "lengths": many}, seqlen),
        "prefix_tree, tokens": ("prefix_tree", {"parents": any_tree(rng, columns)}, seqlen),
        "prefix_tree, chain": ("prefix_tree", {"parents": tokens - 1}, seqlen),
        "prefix_tree, leaves": ("prefix_tree", {"parents": np.where(tokens > 0, 0, -1)}, seqlen),
        "padding": ("padding", {"key_lengths": np.array([half])}, {"seqlen_q": columns, "seqlen_k": columns}),
        "attention_sink_window": ("attention_sink_window", {"doc_ids": many_ids}, {"sink": 4, **windowed}),
        "block_causal": ("block_causal", {"doc_ids": ids}, {"blocks": 1560}),
        "block_causal, blocks": ("block_causal", {"seqlens": few, "blocks": many}, seqlen),
        "causal_with_blocks": ("causal_with_blocks", {"block_ids": block_ids}, windowed),
        "causal_with_blocks, ids": ("causal_with_blocks", {"block_ids": block_ids, "doc_ids": many_ids}, windowed),
        "block_diffusion": ("block_diffusion", {"seqlens": few_half}, {"blocks": 32, "seqlen": half}),
        "eagle3_ttt": ("eagle3_ttt", {"seqlens": few_quarter}, {"steps": 4, "seqlen": columns // 4}),
        "dflash": (
            "dflash",
            {"anchors": np.arange(0, half, 16), "doc_ids": np.repeat(np.arange(FEW), few_half)},
            {"block": 16},
        ),
    }


class Build:
    """A build of a mask's vectors, `bounds`: launch() puts it on the stream of the last build()."""

    def __init__(self, family, vectors, numbers, device):
        import torch
        from flashmask import capi
        from flashmask._core import ctypes_calls
        from harness import calls

        self.device, self.family, self.calls = torch.device(device), family.encode(), calls
        self.vectors = {name: torch.from_numpy(np.ascontiguousarray(x)).to(device) for name, x in vectors.items()}
        tensors = {name: calls.tensor(x) for name, x in self.vectors.items()}
        if has_flag := self.device.type == "cuda" and family in ("hash_sparse", "prefix_tree"):
            self.unfit = torch.empty(1, dtype=torch.int32, device=device)
        outputs = {"unfit_out": calls.tensor(self.unfit)} if has_flag else {}
        self.parameters = ctypes_calls.mask_parameters({**tensors, **outputs}, numbers)
        self.mask = capi.make(capi.Mask)
        self.scratch = None
        self.allocate = C.CFUNCTYPE(C.c_void_p, C.c_void_p, C.c_size_t)(self._memory)
        self.options = calls.device_options(self.device, allocate=C.cast(self.allocate, C.c_void_p))
        self._arguments = (self.family, C.byref(self.parameters), C.byref(self.mask), C.byref(self.options))
        calls.check(calls.lib.fm_mask_shape(*self._arguments))
        self.bounds = torch.empty(tuple(self.mask.bounds.shape[:4]), dtype=torch.int32, device=device)
        self.mask.bounds = calls.tensor(self.bounds)

    def _memory(self, _, count):
        import torch

        if self.scratch is None:
            self.scratch = torch.empty(count, dtype=torch.uint8, device=self.device)
        return self.scratch.data_ptr()

    def build(self):
        self.options.stream = self.calls.stream_of(self.device)
        self.launch()
        return self

    def launch(self):
        self.calls.check(self.calls.lib.fm_mask_build(*self._arguments))


def host_ms(build):
    """Median milliseconds of a build in host memory, which takes one core."""
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        build.launch()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main():
    for name, case in cases().items():
        print(f"{name:28} {host_ms(Build(*case, 'cpu')):6.2f} ms", flush=True)


if __name__ == "__main__":
    main()
