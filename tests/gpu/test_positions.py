# SPDX-License-Identifier: Apache-2.0
"""Bands over positions, forward and backward."""

from dataclasses import replace

import cases
import numpy as np
import pytest
import torch
from cases import Case
from feature_cases import alibi
from harness.calls import Plan
from ingredients import BF16, F16, RAGGED, dims, ints, two_intervals, types


@pytest.fixture(params=["forward", "backward"])
def check(request):
    return {"forward": cases.check, "backward": cases.check_backward}[request.param]


def in_order(seqlen, batch=1):
    return ints(np.tile(np.arange(seqlen), (batch, 1)))


def branches(rng, seqlen, batch=1, length=60):
    """Positions as of packed trees: runs that go up by one, each from somewhere before the end of the one before."""
    rows = []
    for _ in range(batch):
        row, at = [], 0
        for _ in range(seqlen):
            at = int(rng.integers(0, at + 1)) if rng.random() < 1 / length else at
            row.append(at)
            at += 1
        rows.append(row)
    return ints(np.reshape(rows, (batch, seqlen)))


def tree(rng, seqlen, window, batch=1):
    """Bounds and positions of random trees with a window along their paths, for window_size=(window - 1, -1)."""
    bounds, positions = np.zeros((batch, 1, seqlen, 2), np.int32), np.zeros((batch, seqlen), np.int32)
    for b in range(batch):
        open_tokens, token = [], 0  # the tokens on the path to the current one
        while token < seqlen:
            keep = int(rng.integers(0, len(open_tokens) + 1)) if rng.random() < 0.8 else len(open_tokens)
            for ended in open_tokens[keep:]:
                bounds[b, 0, ended, 0] = token
            open_tokens = open_tokens[:keep]
            for _ in range(min(int(rng.integers(1, 200)), seqlen - token)):
                positions[b, token] = len(open_tokens)
                open_tokens.append(token)
                token += 1
        for ended in open_tokens:
            bounds[b, 0, ended, 0] = seqlen
        bounds[b, 0, :, 1] = np.arange(seqlen)
    at = ints(positions)
    return {"bounds": ints(bounds), "window": (window - 1, -1), "q_pos": at, "k_pos": at.clone()}


@types
@dims
@pytest.mark.parametrize("band", [{"causal": True}, {"window": (70, 9)}, {"causal": True, "window": (40, -1)}])
def test_bands(check, dtype, dim, band):
    rng = np.random.default_rng(dim)
    for batch in (1, 2):
        case = Case(517, 700, batch=2, heads=4, heads_kv=2, dim=dim, dtype=dtype, **band)
        check(replace(case, q_pos=branches(rng, 517, batch), k_pos=branches(rng, 700)))
    shuffled = [ints(rng.integers(-300, 300, (2, n))) for n in (517, 700)]
    check(replace(case, q_pos=shuffled[0], k_pos=shuffled[1]))


@dims
@pytest.mark.parametrize("seqlen_q", RAGGED)
def test_ragged_lengths(check, dim, seqlen_q):
    for seqlen_k in RAGGED:
        rng = np.random.default_rng(seqlen_k)
        given = {"q_pos": branches(rng, seqlen_q, length=20), "k_pos": branches(rng, seqlen_k, length=20)}
        causal = seqlen_k % 2 == 0
        case = Case(seqlen_q, seqlen_k, dim=dim, dtype=F16 if causal else BF16, seed=seqlen_k, **given)
        check(replace(case, causal=True) if causal else replace(case, window=(30, 3)))


@dims
@pytest.mark.parametrize("window", [1, 64, 300])
def test_trees_with_windows(check, dim, window):
    rng = np.random.default_rng(window)
    check(Case(1300, 1300, batch=2, heads=4, heads_kv=1, dim=dim, **tree(rng, 1300, window, batch=2)))
    check(Case(999, 999, dim=dim, layout="bhsd", **tree(rng, 999, window)))


@dims
def test_a_long_tree(check, dim):
    check(Case(8192, 8192, heads=2, heads_kv=1, dim=dim, **tree(np.random.default_rng(3), 8192, 1000)))


@dims
def test_with_intervals_and_a_block_mask(check, dim):
    rng = np.random.default_rng(5)
    keep = torch.from_numpy(rng.integers(0, 2, (2, 2, 4, 5)).astype(np.uint8)).to(cases.DEVICE)
    given = {"q_pos": branches(rng, 500, 2), "k_pos": branches(rng, 600, 2), "block_mask": keep}
    check(
        Case(
            500, 600, batch=2, heads=4, heads_kv=2, dim=dim, bounds=two_intervals(500, 600, 1), window=(90, 20), **given
        )
    )


@dims
def test_positions_at_the_ends_of_int32(check, dim):
    """Differences do not overflow, and edges are exact however far away."""
    rng = np.random.default_rng(7)
    ends = np.array([-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 2, 2**31 - 1])
    given = {"q_pos": ints(rng.choice(ends, (1, 300))), "k_pos": ints(rng.choice(ends, (1, 200)))}
    for band in ({"causal": True}, {"window": (2**31 - 2, 0)}, {"window": (1, 2**31 - 2)}):
        check(Case(300, 200, dim=dim, **band, **given))


@types
@dims
@pytest.mark.parametrize("band", [{"causal": True}, {"window": (130, 20)}])
def test_positions_that_are_the_indices_change_no_bit(dtype, dim, band):
    case = Case(700, 700, batch=2, heads=4, heads_kv=2, dim=dim, dtype=dtype, **band)
    same = replace(case, q_pos=in_order(700, 2), k_pos=in_order(700))
    plain, over_positions = (cases.call(c, c.mask(), plan=Plan(c.mask())).run() for c in (case, same))
    cases.assert_same(plain, over_positions, "over positions", case)
    dout, dlse = cases.gradient_inputs(case)
    gradients = [
        cases.call_backward(c, forward, dout, dlse, deterministic=True).run()
        for c, forward in ((case, plain), (same, over_positions))
    ]
    cases.assert_same_gradients(*gradients, "over positions", case)


@types
@dims
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_takes_positions_of_the_mask(check, causal, dtype, dim):
    """With a band over them or not; far positions too, whose distances no float32 holds before they are taken."""
    rng = np.random.default_rng(dim)
    positions = {"q_pos": branches(rng, 300, 2), "k_pos": branches(rng, 261, 2)}
    case = Case(300, 261, batch=2, heads=4, heads_kv=2, dim=dim, dtype=dtype, causal=causal, **positions)
    check(replace(case, features=alibi(case, by_batch=True)))
    far = replace(case, **{name: x + 2**30 + 1 for name, x in positions.items()})
    check(replace(far, features=alibi(far)))
