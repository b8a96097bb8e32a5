# SPDX-License-Identifier: Apache-2.0
"""Ingredients of the cases of both directions."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import DEVICE
from harness import kernels

BF16, F16 = torch.bfloat16, torch.float16
RAGGED = (1, 63, 64, 65, 127, 129, 191, 193, 1000)

types = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])


def kernel_dims(op):
    """Head dims, the same for v, that there are kernels of; of a build without any, which tests these tests on the
    CPU, one."""
    return [d for d, dv in kernels.head_dims(kernels.default_library(), op) if d == dv] or [64]


FORWARD_DIMS = kernel_dims("fwd")
DIMS = [d for d in FORWARD_DIMS if d in kernel_dims("bwd")]
forward_dims = pytest.mark.parametrize("dim", FORWARD_DIMS)
dims = pytest.mark.parametrize("dim", DIMS)  # head dims of both directions


def ints(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def document_bounds(lengths, causal=True):
    """LTS, or LTS and UTE, of documents of these lengths: [1, 1, seqlen, n]."""
    ends = np.repeat(np.cumsum(lengths), lengths)
    begins = ends - np.repeat(lengths, lengths)
    return ints(ends[:, None] if causal else np.stack([ends, begins], -1))[None, None].contiguous()


def random_lengths(seqlen, count, seed=0):
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, seqlen), count - 1, replace=False))
    return np.diff([0, *cuts, seqlen])


def two_intervals(seqlen_q, seqlen_k, seed=0, heads=1):
    """Four vectors around the diagonal, piecewise constant: empty, partial and full tiles."""
    rng = np.random.default_rng(seed)
    runs = -(-seqlen_k // 200)
    low = rng.integers(0, seqlen_q + 1, (heads, runs, 4))
    return ints(np.repeat(np.sort(low, -1)[..., [2, 3, 0, 1]], 200, axis=1)[:, :seqlen_k])[None].contiguous()


def adversarial(kind, case):
    """q, k, v whose scores are hard on an online softmax; |scores| stays below 1e4."""
    q, k, v = (x.float() for x in dataclasses.replace(case, inputs=None).tensors())
    steps = torch.linspace(0, 1, case.seqlen_k, device=DEVICE)[None, :, None, None]
    unit = torch.ones(case.dim, device=DEVICE) / case.dim**0.5
    if kind == "large":
        q = q / q.norm(dim=-1, keepdim=True) * 100
        k = k / k.norm(dim=-1, keepdim=True) * 100
    elif kind == "growing":
        q, k = unit * (1 + 0.1 * q), unit * 300 * steps * (1 + 0.01 * k)
    elif kind == "falling":
        q, k = unit * (1 + 0.1 * q), unit * 300 * (1 - steps) * (1 + 0.01 * k)
    elif kind == "constant":
        q, k = q, k[:, :1].expand_as(k)
    elif kind == "outlier":
        k[:, case.seqlen_k // 3] *= 100
    elif kind == "overtaken":  # in the second tile and in a later one, a key that outweighs all before it by a little
        q, k = unit * (1 + 0.05 * q), 0.02 * k
        k[:, 200] += 6 * unit
        k[:, 600] += 8.5 * unit
    elif kind == "very negative":
        q, k = unit * (1 + 0.01 * q), -unit * 2000 * (1 + 0.01 * k)
    return tuple(x.to(case.dtype).contiguous() for x in (q, k, v))


def assert_neither_waits_nor_allocates(run):
    """run() returns while the stream is busy, and leaves the device as much free memory as there was, one time of eight
    at least: programs beside this one allocate, too."""
    changes = []
    while 0 not in changes and len(changes) < 8:
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        torch.cuda._sleep(int(2e9))  # about a second
        run()
        event = torch.cuda.current_stream().record_event()
        assert not event.query(), "the call waited for the stream"
        torch.cuda.synchronize()
        changes.append(torch.cuda.mem_get_info()[0] - free)
    assert 0 in changes, f"the call changed how much device memory is free: by {changes} bytes"
