# SPDX-License-Identifier: Apache-2.0
"""Cases both forward and backward: against float64, and bit for bit in every way that must not change a bit."""

import cases
import numpy as np
import pytest
import torch
from cases import Case
from ingredients import (
    BF16,
    F16,
    RAGGED,
    adversarial,
    dims,
    document_bounds,
    ints,
    random_lengths,
    two_intervals,
    types,
)


@pytest.fixture(params=["forward", "backward"])
def check(request):
    return {"forward": cases.check, "backward": cases.check_backward}[request.param]


@types
@dims
@pytest.mark.parametrize("causal", [False, True])
def test_no_bounds(check, dtype, dim, causal):
    check(Case(512, 512, batch=2, dim=dim, dtype=dtype, causal=causal))


@dims
@pytest.mark.parametrize("seqlen_q", RAGGED)
def test_ragged_lengths(check, dim, seqlen_q):
    for seqlen_k in RAGGED:
        for causal in (False, True):
            check(Case(seqlen_q, seqlen_k, dim=dim, causal=causal, dtype=F16 if causal else BF16, seed=seqlen_k))
        check(Case(seqlen_q, seqlen_k, dim=dim, bounds=two_intervals(seqlen_q, seqlen_k, seqlen_k), seed=seqlen_k))


@dims
def test_large_documents(check, dim):
    check(Case(8192, 8192, heads=2, heads_kv=1, dim=dim, causal=True, bounds=document_bounds(random_lengths(8192, 9))))
    check(
        Case(8192, 8192, heads=2, heads_kv=1, dim=dim, bounds=document_bounds(random_lengths(8192, 40), causal=False))
    )


@types
@dims
@pytest.mark.parametrize("scale", [None, 0.3, 0.0, 1e-4, 2.0])
def test_scales(check, dtype, dim, scale):
    check(Case(260, 390, dim=dim, dtype=dtype, scale=scale, bounds=two_intervals(260, 390, 3)))


@dims
def test_rows_that_see_nothing(check, dim):
    """Whole tiles of them, a few inside of a tile, all of them, and the whole of one batch entry."""
    seqlen = 400
    for first, end in ((0, 256), (130, 140), (399, 400), (0, seqlen)):
        bounds = ints(np.tile([[first, end]], (seqlen, 1)))[None, None].contiguous()
        check(Case(seqlen, seqlen, dim=dim, causal=True, bounds=bounds))
    check(Case(seqlen, seqlen, dim=dim, causal=True, q_offset=-200))
    bounds = torch.stack([ints(np.full((seqlen, 1), n))[None] for n in (0, seqlen)]).contiguous()
    check(Case(seqlen, seqlen, batch=2, dim=dim, causal=True, bounds=bounds))


@dims
@pytest.mark.parametrize("q_offset", [-500, -130, -1, 0, 1, 100, 127, 128, 500])
def test_offsets(check, dim, q_offset):
    for window in (None, (64, 0), (30, 40), (0, 0), (-1, 20)):
        check(Case(200, 330, dim=dim, causal=window is None, window=window, q_offset=q_offset))


@types
@dims
@pytest.mark.parametrize("kind", ["large", "growing", "falling", "constant", "outlier", "overtaken", "very negative"])
def test_adversarial_scores(check, dtype, dim, kind):
    for causal, bounds in ((False, None), (True, document_bounds([300, 5, 400, 195]))):
        case = Case(900, 900, dim=dim, dtype=dtype, causal=causal, bounds=bounds, scale=1.0)
        case.inputs = adversarial(kind, case)
        check(case)
