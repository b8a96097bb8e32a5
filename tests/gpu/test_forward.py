# SPDX-License-Identifier: Apache-2.0
"""The forward pass against float64, and bit for bit against itself in every way that must not change a bit."""

import dataclasses

import pytest
import torch
from cases import DEVICE, Case, assert_same, call, check, same_bits
from harness import oracle
from harness.calls import Forward, Plan
from ingredients import (
    BF16,
    F16,
    FORWARD_DIMS,
    assert_neither_waits_nor_allocates,
    document_bounds,
    forward_dims,
    random_lengths,
    two_intervals,
    types,
)
from random_cases import random_case

PER_GROUP, GROUPS = 25, 24


@types
@forward_dims
@pytest.mark.parametrize("heads, heads_kv", [(8, 8), (8, 2), (6, 1), (6, 3)])
def test_grouped_heads(dtype, dim, heads, heads_kv):
    bounds = torch.cat([document_bounds(random_lengths(640, 5, seed)) for seed in range(heads_kv)], 1)
    check(Case(640, 640, batch=2, heads=heads, heads_kv=heads_kv, dim=dim, dtype=dtype, causal=True, bounds=bounds))


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, dim",
    [(4096, 4224, 64), (8191, 8192, 128), (8192, 8191, 64), (16383, 16385, 128), (16385, 16383, 64)],
)
def test_large_shapes(seqlen_q, seqlen_k, dim):
    heads = 2 if DEVICE.type == "cuda" else 1
    check(Case(seqlen_q, seqlen_k, heads=heads, heads_kv=1, dim=dim, bounds=two_intervals(seqlen_q, seqlen_k, dim)))


@pytest.mark.cuda
@pytest.mark.large
@forward_dims
def test_more_than_two_to_the_31_elements(dim):
    """Rows near both ends of q, whose offsets do not fit 32 bits, under a narrow window."""
    heads, seqlen = -(-16384 // dim), 140000
    assert heads * seqlen * dim > 2**31
    case = Case(seqlen, seqlen, heads=heads, heads_kv=1, dim=dim, causal=True, window=(127, -1))
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    q = torch.randn((1, seqlen, heads, dim), dtype=BF16, device=DEVICE, generator=generator)
    k, v = (torch.randn((1, seqlen, 1, dim), dtype=BF16, device=DEVICE, generator=generator) for _ in range(2))
    ours = Forward(q, k, v, case.mask()).poison().run()
    for begin in (0, 2**31 // (heads * dim) - 100, seqlen - 200):
        rows, first = slice(begin, begin + 200), max(0, begin - 127)
        keys = slice(first, begin + 200)

        def visible(r, begin=begin, first=first):
            i, j = r[:, None] + begin, torch.arange(first, begin + 200, device=DEVICE)[None]
            return ((j <= i) & (j >= i - 127))[None, None]

        found = oracle.errors(q[:, rows], k[:, keys], v[:, keys], ours.out[:, rows], ours.lse[:, :, rows], visible)
        assert not list(oracle.complaints(found)), (begin, list(oracle.complaints(found)))


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_masks(group):
    for seed in range(group * PER_GROUP, (group + 1) * PER_GROUP):
        check(random_case(seed, FORWARD_DIMS))


@types
@forward_dims
@pytest.mark.parametrize("layout", ["bhsd", "padded", "packed"])
def test_layouts(dtype, dim, layout):
    case = Case(
        300,
        300,
        batch=2,
        heads=3,
        heads_kv=3,
        dim=dim,
        dtype=dtype,
        layout=layout,
        causal=True,
        bounds=document_bounds([100, 1, 150, 49]),
    )
    strided = check(case)
    contiguous = dataclasses.replace(case, layout="bshd", inputs=tuple(x.contiguous() for x in case.tensors()))
    assert_same(strided, call(contiguous, contiguous.mask()).run(), f"{layout} against contiguous", case)


@forward_dims
def test_nothing_to_do(dim):
    no_keys = Case(130, 0, dim=dim)
    ours = call(no_keys, no_keys.mask()).run()
    assert bool((ours.out == 0).all()) and bool((ours.lse == float("-inf")).all())
    for case in (Case(130, 130, batch=0, dim=dim), Case(0, 130, dim=dim), Case(0, 0, batch=0, dim=dim)):
        call(case, case.mask()).run()


@types
@forward_dims
@pytest.mark.parametrize("causal", [False, True])
def test_documents_do_not_depend_on_their_neighbours(dtype, dim, causal):
    lengths = [200, 70, 130, 400, 224]
    case = Case(1024, 1024, dim=dim, dtype=dtype, causal=causal, bounds=document_bounds(lengths, causal))
    before = check(case)
    for n in range(len(lengths)):
        begin, end = sum(lengths[:n]), sum(lengths[: n + 1])
        others = torch.ones(1024, dtype=torch.bool, device=DEVICE)
        others[begin:end] = False
        changed = [x.clone() for x in case.tensors()]
        for x, factor in zip(changed, (3.0, 50.0, -7.0)):
            x[:, others] = (torch.randn_like(x[:, others]) * factor).to(dtype)
        other = dataclasses.replace(case, inputs=tuple(changed))
        after = call(other, other.mask()).run()
        assert same_bits(before.out[:, begin:end], after.out[:, begin:end]), (
            f"document {n} changed with its neighbours; {case}"
        )
        assert same_bits(before.lse[:, :, begin:end], after.lse[:, :, begin:end]), (
            f"lse of document {n} changed with its neighbours; {case}"
        )


@forward_dims
def test_a_head_does_not_depend_on_the_batch(dim):
    """A head has equal values alone and inside of a larger call."""
    bounds = document_bounds(random_lengths(777, 6))
    case = Case(777, 777, batch=3, heads=4, heads_kv=4, dim=dim, causal=True, bounds=bounds)
    together = check(case)
    alone = Case(
        777,
        777,
        batch=1,
        heads=1,
        heads_kv=1,
        dim=dim,
        causal=True,
        bounds=bounds,
        inputs=tuple(x[2:, :, 3:] for x in case.tensors()),
    )
    single = call(alone, alone.mask()).run()
    assert same_bits(single.out, together.out[2:, :, 3:]) and same_bits(single.lse, together.lse[2:, 3:])


@forward_dims
def test_one_plan_serves_many_calls(dim):
    bounds = document_bounds(random_lengths(700, 7))
    first = Case(700, 700, batch=2, heads=4, heads_kv=2, dim=dim, causal=True, bounds=bounds)
    second = Case(700, 700, batch=1, heads=2, heads_kv=2, dim=dim, dtype=F16, causal=True, bounds=bounds, seed=1)
    mask = first.mask()
    plan = Plan(mask)
    for case in (first, second, first):
        assert_same(call(case, mask, plan=plan).run(), call(case, case.mask()).run(), "shared plan", case)


@pytest.mark.cuda
@forward_dims
def test_side_streams(dim):
    """One plan, calls on several streams at once."""
    case = Case(
        2000, 2000, batch=2, heads=8, heads_kv=8, dim=dim, causal=True, bounds=document_bounds(random_lengths(2000, 6))
    )
    mask = case.mask()
    expected = call(case, mask, plan=Plan(mask)).run()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    with torch.cuda.stream(streams[0]):
        plan = Plan(mask)
        ready = streams[0].record_event()
    calls = []
    for stream in streams:
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            calls.append(call(case, mask, plan=plan).run())
    torch.cuda.synchronize()
    for other in calls:
        assert_same(expected, other, "on a side stream", case)


@pytest.mark.cuda
@forward_dims
@pytest.mark.parametrize("own_plan", [False, True])
def test_graph_capture(dim, own_plan):
    """A graph of planner and forward follows the bounds and the inputs that are in the tensors when it is replayed."""
    case = Case(
        1500, 1500, batch=2, heads=4, heads_kv=4, dim=dim, causal=True, bounds=document_bounds(random_lengths(1500, 5))
    )
    mask = case.mask()
    plan = None if own_plan else Plan(mask, build=False)
    captured = call(case, mask, plan=plan)

    def work():
        if plan is not None:
            plan.build()
        captured.run()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for seed in range(3):
        case.bounds.copy_(document_bounds(random_lengths(1500, 4 + 3 * seed, seed)))
        for x in case.tensors():
            x.normal_()
        captured.poison()
        graph.replay()
        torch.cuda.synchronize()
        expected = call(case, case.mask()).run()
        assert_same(expected, captured, f"replay {seed}", case)
        found = oracle.errors(*case.tensors(), captured.out, captured.lse, case.visible)
        assert not list(oracle.complaints(found)), list(oracle.complaints(found))


@pytest.mark.cuda
@pytest.mark.large
def test_nothing_waits_or_allocates():
    """A call returns while the stream is still busy, and takes no memory from the allocator that torch uses."""
    case = Case(4096, 4096, heads=8, heads_kv=8, dim=128, causal=True)
    mask = case.mask()
    plan = Plan(mask)
    ours = call(case, mask, plan=plan).run()
    assert_neither_waits_nor_allocates(lambda: (plan.build(), ours.run()))
