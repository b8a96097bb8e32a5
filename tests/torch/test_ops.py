# SPDX-License-Identifier: Apache-2.0
"""The operators themselves: what torch checks of any operator, their errors, and what loading them does."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flashmask
from flashmask import ops

CPU = torch.device("cpu")
operators = torch.ops.flashmask


def inputs(dtype=torch.float32, batch=2, seqlen_q=70, seqlen_k=90, heads_q=4, heads_kv=2, head_dim=8, head_dim_v=6):
    return (torch.randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype), torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype),
            torch.randn(batch, seqlen_k, heads_kv, head_dim_v, dtype=dtype))


def bounds(seqlen_q=70, seqlen_k=90, batch=2, heads=1, vectors=1):
    return torch.randint(0, seqlen_q + 1, (batch, heads, seqlen_k, vectors), dtype=torch.int32)


def block_mask(seqlen_q=70, seqlen_k=90, heads=2):
    return torch.rand(1, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)) < 0.7


# bounds, block_mask, causal, q_offset, window_left, window_right
MASKS = {
    "none": lambda: (None, None, False, None, -1, -1),
    "causal": lambda: (None, None, True, None, -1, -1),
    "band": lambda: (None, None, True, 3, 20, -1),
    "causal bounds": lambda: (bounds(), None, True, None, -1, -1),
    "heads": lambda: (bounds(heads=4, batch=1, vectors=4), None, False, None, -1, 5),
    "blocks": lambda: (None, block_mask(), False, None, -1, -1),
    "bounds and blocks": lambda: (bounds(vectors=2), block_mask(), False, -4, -1, -1),
}


@pytest.mark.parametrize("mask", MASKS)
def test_opcheck(mask):
    tensors, band = (made := MASKS[mask]())[:2], made[2:]
    torch.library.opcheck(operators.plan.default, (*tensors, 70, 90, *band, CPU))
    plan = operators.plan(*tensors, 70, 90, *band, CPU)
    q, k, v = inputs()
    for x in (q, k, v):
        x.requires_grad_()
    torch.library.opcheck(operators.forward.default, (q, k, v, *tensors, plan, 0.3, *band, False, "auto"))
    with torch.no_grad():
        out, lse = operators.forward(q, k, v, *tensors, plan, None, *band, False, "auto")
    q, k, v = q.detach(), k.detach(), v.detach()
    torch.library.opcheck(operators.backward.default, (torch.randn_like(out), None, q, k, v, out, lse, *tensors, plan, None, *band, True, "auto"))


@pytest.mark.parametrize("seqlen_q", [0, 1, 64, 65, 128, 129, 4000, 70000])
@pytest.mark.parametrize("seqlen_k", [0, 1, 128, 129, 8200])
@pytest.mark.parametrize("batch, heads", [(1, 1), (3, 5)])
def test_traced_plans_have_the_size_of_real_ones(seqlen_q, seqlen_k, batch, heads):
    def plan():
        return ops.plan(flashmask.Mask(seqlen_q, seqlen_k, causal=True, bounds=torch.zeros(batch, heads, seqlen_k, 1, dtype=torch.int32)))

    with FakeTensorMode():
        traced = plan()
    assert traced.shape == plan().shape


def attend(q, k, v, *, mask=(None, None, None), backend="auto"):
    return operators.forward(q, k, v, *mask, None, False, None, -1, -1, False, backend)


@pytest.mark.parametrize("change, text", [
    (lambda q, k, v: attend(q[0], k, v), "query has 3 dimensions"),
    (lambda q, k, v: attend(q, k.half(), v), "k is float16"),
    (lambda q, k, v: attend(q, k[:, :, :1].expand(-1, -1, 3, -1), v), "q has 4 heads and k 3"),
    (lambda q, k, v: attend(q.mT.contiguous().mT, k, v), "last dimension; it must be contiguous"),
    (lambda q, k, v: attend(q.long(), k, v), "query has a dtype"),
    (lambda q, k, v: attend(q, k, v, mask=(torch.zeros(2, 1, 90, 2), None, None)), "int32"),
    (lambda q, k, v: attend(q, k, v, mask=(torch.zeros(2, 3, 90, 2, dtype=torch.int32), None, None)), "3 heads"),
    (lambda q, k, v: attend(q, k, v, mask=(None, None, torch.zeros(3))), "plan must be what flashmask::plan returned"),
    (lambda q, k, v: attend(q, k, v, mask=(None, None, operators.plan(None, None, 70, 91, False, None, -1, -1, CPU))), "plan was made for lengths"),
    (lambda q, k, v: attend(q, k, v, backend="tpu"), "backend 'tpu'"),
])
def test_wrong_arguments_are_value_errors(change, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        change(*inputs())


def test_what_no_backend_takes_says_so_and_why():
    with pytest.raises(flashmask.UnsupportedError, match="float64 is taken by backend 'reference' only"):
        ops.attention(*inputs(torch.float64))
    with pytest.raises(flashmask.UnsupportedError, match="head_dim .* is 300; it must be between 1 and 256"):
        ops.attention(*inputs(head_dim=300))
    assert issubclass(flashmask.UnsupportedError, NotImplementedError)


def test_second_derivatives_are_refused():
    q, k, v = (x.requires_grad_() for x in inputs())
    (dq,) = torch.autograd.grad(ops.attention(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(flashmask.UnsupportedError, match="second derivatives"):
        dq.sum().backward()


def python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)


def test_import_touches_neither_torch_nor_cuda():
    run = python("import sys, flashmask; assert 'torch' not in sys.modules; flashmask.flashmask_attention, flashmask.masks.causal; "
                 "import torch; assert not torch.cuda.is_initialized(); assert 'flashmask_attention' in dir(flashmask)")
    assert run.returncode == 0, run.stderr


def test_without_torch_the_c_interface_works_and_the_rest_says_what_to_install():
    run = python("import sys; sys.modules['torch'] = None; import flashmask.capi; assert flashmask.capi.load().fm_version(); flashmask.Mask")
    assert run.returncode != 0 and "pip install torch" in run.stderr


def test_a_missing_library_is_named():
    run = python("import flashmask; flashmask.ops", FLASHMASK_TORCH_LIBRARY="/nowhere/libflashmask_torch.so")
    assert run.returncode != 0 and "ImportError: /nowhere/libflashmask_torch.so is not there" in run.stderr


def test_an_old_torch_is_refused():
    from flashmask import _library

    _library.check_torch("2.10.0")
    _library.check_torch("3.0.0a0+git123")
    with pytest.raises(ImportError, match="2.10 or later; this is 2.9.1"):
        _library.check_torch("2.9.1")
