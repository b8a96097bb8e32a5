# SPDX-License-Identifier: Apache-2.0
"""The device that the tests run on, FLASHMASK_TEST_DEVICE (cpu), and what its backend takes.

On CUDA that is bfloat16 and float16, and head dims that are multiples of 8. What is about host memory runs there too.
"""

import os

import pytest
import torch
from harness import kernels

DEVICE = torch.device(os.environ.get("FLASHMASK_TEST_DEVICE", "cpu"))
ON_CUDA = DEVICE.type == "cuda"
if ON_CUDA and DEVICE.index is None:
    DEVICE = torch.device("cuda", 0)  # as tensors name it
DTYPE = torch.bfloat16 if ON_CUDA else torch.float32
# Relative to the largest element: out and the weights of the values are rounded to out's dtype; lse stays float32.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
LSE_TOLERANCE = 1e-3

cuda_only = pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device: FLASHMASK_TEST_DEVICE=cuda")


def cpu_only(reason):
    return pytest.mark.skipif(ON_CUDA, reason=reason)


def head_dims(*dims):
    """`dims` on the CPU, the next multiples of 8 on CUDA."""
    return tuple(-(-dim // 8) * 8 for dim in dims) if ON_CUDA else dims


def head_dim_pairs(*on_the_cpu):
    """(head_dim, head_dim_v) of all kernels on CUDA, `on_the_cpu` elsewhere."""
    return kernels.head_dims(kernels.default_library(), "bwd") if ON_CUDA else on_the_cpu


def put(*tensors, dtype=None):
    """The tensors on the device, in its dtype."""
    return [x.to(DEVICE, dtype or DTYPE) for x in tensors]


def tolerance_of(name, dtype):
    """How far from float64 a result or gradient of that name may be."""
    return LSE_TOLERANCE if name == "lse" and dtype != torch.float32 else TOLERANCES[dtype]
