# SPDX-License-Identifier: Apache-2.0
"""Partial results: float32 out, dq, dk and dv are what the ordinary call rounds, and add up over disjoint keys."""

from dataclasses import replace

import pytest
import torch
from cases import (
    DEVICE,
    Case,
    assert_same,
    assert_same_gradients,
    call,
    call_backward,
    check,
    check_backward,
    gradient_inputs,
)
from feature_cases import MASKS, all_dims, sink_of
from harness import oracle
from harness.calls import CallError, explained
from harness.features import Features
from ingredients import F16, FORWARD_DIMS, forward_dims, types
from random_cases import random_case

PARTIAL = Features(partial=True)
PER_GROUP, GROUPS = 15, 4


def masked(mask, features=PARTIAL, **fields):
    case = Case(**fields)
    for name, value in MASKS[mask](case).items():
        setattr(case, name, value)
    case.features = features
    return case


def plain(case):
    return replace(case, features=replace(case.features, partial=False))


def rounded(x, dtype):
    """-0 as 0, which sums of several tiles are."""
    return x.to(dtype) + 0


class Rounded:
    """A call's results, rounded."""

    def __init__(self, results, dtype):
        self.lse = getattr(results, "lse", None)
        self.dsink = getattr(results, "dsink", None)
        for name in ("out", "dq", "dk", "dv"):
            if hasattr(results, name):
                setattr(self, name, rounded(getattr(results, name), dtype))


def check_rounding(case):
    """Forward, and backward with out rounded and not: rounding gives the ordinary call's bits."""
    ordinary = plain(case)
    parts, whole = (call(c, c.mask()).run() for c in (case, ordinary))
    assert parts.out.dtype == torch.float32
    assert_same(Rounded(parts, case.dtype), Rounded(whole, case.dtype), "partial", case)
    dout, dlse = gradient_inputs(case)
    want = Rounded(call_backward(ordinary, whole, dout, dlse, deterministic=True).run(), case.dtype)
    for out in (whole.out, whole.out.float()):
        parts.out = out
        got = call_backward(case, parts, dout, dlse, deterministic=True).run()
        assert got.dq.dtype == out.dtype and got.dk.dtype == got.dv.dtype == torch.float32
        assert_same_gradients(Rounded(got, case.dtype), want, f"partial, out in {out.dtype}", case)


@types
@all_dims
def test_rounding_gives_the_ordinary_bits(dtype, dim, dim_v):
    for n, mask in enumerate(MASKS):
        heads, heads_kv = ((4, 2), (6, 1), (3, 3), (4, 4))[n]
        shape = {"seqlen_q": 300, "seqlen_k": 261, "batch": 2, "heads": heads, "heads_kv": heads_kv}
        check_rounding(masked(mask, **shape, dim=dim, dim_v=dim_v, dtype=dtype))


@all_dims
def test_calls_that_fill_the_device(dim, dim_v):
    """Work tiles with all query heads of their key head, more than one for each CTA, and the tallest tiles."""
    shape = {"seqlen_q": 1100, "seqlen_k": 1100, "batch": 2, "heads": 32, "heads_kv": 16}
    check_rounding(masked("two intervals", **shape, dim=dim, dim_v=dim_v))


@types
@all_dims
def test_against_float64(dtype, dim, dim_v):
    """Twice with the same bits, with a dense mask's bits, and the live tiles alone."""
    for with_sink in (False, True):
        features = Features(sink=sink_of(4) if with_sink else None, partial=True)
        shape = {"seqlen_q": 300, "seqlen_k": 261, "heads": 4, "dim": dim, "dim_v": dim_v, "dtype": dtype}
        case = masked("documents", features, **shape)
        check(case)
        check_backward(case)


@forward_dims
def test_one_key_tile(dim):
    """Its part of dq is the only one."""
    for seqlen_k in (1, 64, 100, 128):
        check_rounding(masked("none", seqlen_q=130, seqlen_k=seqlen_k, heads=2, dim=dim))


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_masks(group):
    for seed in range(group * PER_GROUP, (group + 1) * PER_GROUP):
        check_rounding(replace(random_case(seed, FORWARD_DIMS), features=PARTIAL))


@forward_dims
@pytest.mark.parametrize("layout", ["bhsd", "padded"])
def test_layouts(layout, dim):
    check_rounding(masked("documents", seqlen_q=300, seqlen_k=300, batch=2, heads=4, dim=dim, dtype=F16, layout=layout))


@types
@all_dims
def test_positions(dtype, dim, dim_v):
    """A band over several runs of rows, as the rows of a rank have it."""
    rows = torch.cat([torch.arange(0, 128), torch.arange(384, 512)])[None].int().to(DEVICE)
    keys = torch.arange(512)[None].int().to(DEVICE)
    case = Case(256, 512, heads=4, dim=dim, dim_v=dim_v, dtype=dtype, causal=True, window=(90, 0), features=PARTIAL)
    case.q_pos, case.k_pos = rows, keys
    check_rounding(case)


@types
@all_dims
def test_parts_over_disjoint_keys_add_up(dtype, dim, dim_v):
    """Merged in float64: the attention over all keys, by the rule of accuracy of ordinary calls."""
    case = masked("documents", seqlen_q=300, seqlen_k=300, heads=4, dim=dim, dim_v=dim_v, dtype=dtype)
    q, k, v = case.tensors()
    dout, dlse = gradient_inputs(case)
    cut = 130
    parts = []
    for begin, end in ((0, cut), (cut, 300)):
        some = replace(case, seqlen_k=end - begin, q_offset=-begin, bounds=case.bounds[:, :, begin:end].contiguous())
        some.inputs = q, k[:, begin:end], v[:, begin:end]
        parts.append((some, call(some, some.mask()).run()))
    lse = torch.logsumexp(torch.stack([part.lse.double() for _, part in parts]), 0)
    weights = [torch.exp(part.lse.double() - lse).nan_to_num(0).transpose(1, 2)[..., None] for _, part in parts]
    out = sum(w * part.out.double() for w, (_, part) in zip(weights, parts)).float()
    lse = lse.float()
    found = oracle.errors(q, k, v, out, lse, case.visible, case.scale)
    assert not list(oracle.complaints(found)), f"{list(oracle.complaints(found))}; {case}"
    gradients = []
    for some, part in parts:
        part.out, part.lse = out, lse
        gradients.append(call_backward(some, part, dout, dlse).run().gradients())
    dq = sum(g[0] for g in gradients)
    dk, dv = (torch.cat([g[n] for g in gradients], 1) for n in (1, 2))
    errors = oracle.gradient_errors(q, k, v, dout, dlse, out, (dq, dk, dv), case.visible, case.scale)
    assert not list(oracle.gradient_complaints(errors)), f"{list(oracle.gradient_complaints(errors))}; {case}"


def runs_hopper_kernels():
    return explained(call(Case(300, 300), None), False)["arch"] == "sm90"


@pytest.mark.cuda
@all_dims
def test_explain_names_the_kernels(dim, dim_v):
    """Hopper has kernels of partial results; those of mma.sync store either type."""
    case = masked("documents", seqlen_q=4096, seqlen_k=4096, heads=16, dim=dim, dim_v=dim_v)
    forward = call(case, case.mask())
    back = explained(call_backward(case, forward, *gradient_inputs(case)), True)
    if not runs_hopper_kernels():
        assert not any("partial" in name for name in explained(forward, False)["kernels"] + back["kernels"])
        return
    assert explained(forward, False)["instance"].endswith(".partial")
    assert back["instance"].endswith(".split")
    assert sum(".partial." in name for name in back["kernels"]) == 3, back


@pytest.mark.cuda
def test_with_softcap():
    """Hopper has no such kernels."""
    features = Features(softcap=30.0, partial=True)
    if not runs_hopper_kernels():
        check_rounding(masked("documents", features, seqlen_q=300, seqlen_k=300, heads=4))
        return
    with pytest.raises(CallError, match="softcap and partial_out are set together"):
        call(Case(300, 300, features=features), None)
