# SPDX-License-Identifier: Apache-2.0
"""Head dims between those of the kernels: padded by the copies, in no tensor."""

import dataclasses

import numpy as np
import pytest
import torch
from cases import Case, assert_same, assert_same_gradients, call, call_backward, check, check_backward, gradient_inputs
from flashmask import capi
from harness.calls import CallError
from ingredients import BF16, F16, document_bounds, random_lengths, two_intervals

# Head dims of models, and head_dim_v above head_dim.
PAIRS = [(40, 40), (72, 72), (80, 80), (112, 112), (160, 160), (224, 224), (8, 8), (192, 128), (64, 128), (8, 256)]
RANDOM_PAIRS = 64
COLUMNS, SENTINEL = 8, 77.0


def random_pairs():
    rng = np.random.default_rng(5)
    return [tuple(8 * int(n) for n in rng.integers(1, 33, 2)) for _ in range(RANDOM_PAIRS)]


def case_of(number, dim, dim_v):
    """Its mask, type and layout by its number."""
    masks = (
        {"causal": True, "bounds": document_bounds(random_lengths(300, 4, number))},
        {"bounds": two_intervals(300, 300, number)},
        {"causal": True},
        {"window": (70, 30)},
    )
    return Case(
        300,
        300,
        heads=4,
        heads_kv=2,
        dim=dim,
        dim_v=dim_v,
        dtype=(BF16, F16)[number % 2],
        layout=("padded", "bshd", "bhsd")[number % 3],
        seed=number,
        **masks[number % len(masks)],
    )


pairs = pytest.mark.parametrize("number, dim, dim_v", [(n, *pair) for n, pair in enumerate(PAIRS + random_pairs())])


class WithColumnsBeyond:
    """Makes tensors whose rows are followed by columns that are not theirs, and says whether those are as they were."""

    def __init__(self):
        self.all = []

    def __call__(self, shape, dtype, device):
        self.all.append(torch.full((*shape[:3], shape[3] + COLUMNS), SENTINEL, dtype=dtype, device=device))
        return self.all[-1][..., : shape[3]]

    def untouched(self):
        return all(bool((x[..., -COLUMNS:] == SENTINEL).all()) for x in self.all)


@pairs
def test_forward(number, dim, dim_v):
    case = case_of(number, dim, dim_v)
    ours = check(case)
    made = WithColumnsBeyond()
    q, _, v = case.tensors()
    beyond = call(case, case.mask(), out=made((*q.shape[:3], v.shape[3]), q.dtype, q.device)).run()
    assert_same(ours, beyond, "into rows with columns beyond", case)
    assert made.untouched(), f"the columns past head_dim_v have been written; {case}"


@pairs
def test_backward(number, dim, dim_v):
    case = case_of(number, dim, dim_v)
    try:
        ours = check_backward(case)
    except CallError as error:
        if error.status != capi.UNSUPPORTED:
            raise
        pytest.skip(str(error))
    made = WithColumnsBeyond()
    forward = call(case, case.mask()).run()
    like = lambda x: made(x.shape, x.dtype, x.device)  # noqa: E731
    beyond = call_backward(case, forward, *gradient_inputs(case), like=like, deterministic=True).run()
    assert_same_gradients(ours, beyond, "into rows with columns beyond", case)
    assert made.untouched(), f"the columns past the gradients' rows have been written; {case}"


@pytest.mark.cuda
def test_neighbours_of_a_row_are_not_read():
    """NaN in the columns past head_dim, which belong to someone else."""
    for dim, dim_v in PAIRS:
        case = case_of(3, dim, dim_v)
        expected = call(case, case.mask()).run()
        surrounded = []
        for x in case.tensors():
            whole = torch.full((*x.shape[:3], x.shape[3] + COLUMNS), float("nan"), dtype=x.dtype, device=x.device)
            whole[..., : x.shape[3]] = x
            surrounded.append(whole[..., : x.shape[3]])
        other = dataclasses.replace(case, inputs=tuple(surrounded))
        assert_same(expected, call(other, other.mask()).run(), "beside NaN", case)
