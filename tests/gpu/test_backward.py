# SPDX-License-Identifier: Apache-2.0
"""The backward pass against float64, and bit for bit against itself in every way that must not change a bit."""

import dataclasses
import math

import pytest
import torch
from cases import (
    DEVICE,
    Case,
    assert_same,
    assert_same_gradients,
    call,
    call_backward,
    check_backward,
    check_gradients,
    gradient_inputs,
    same_bits,
    shares_rows,
)
from harness import kernels, oracle
from harness.calls import Backward, CallError, Forward, Plan, explained
from ingredients import (
    BF16,
    assert_neither_waits_nor_allocates,
    dims,
    document_bounds,
    ints,
    random_lengths,
    two_intervals,
    types,
)
from random_cases import random_case

PER_GROUP, GROUPS = 25, 24


@types
@dims
@pytest.mark.parametrize("heads, heads_kv", [(8, 8), (8, 2), (6, 1), (6, 3)])
@pytest.mark.parametrize("mask_heads", ["one", "kv", "q"])
def test_grouped_heads(dtype, dim, heads, heads_kv, mask_heads):
    count = {"one": 1, "kv": heads_kv, "q": heads}[mask_heads]
    bounds = torch.cat([document_bounds(random_lengths(640, 5, seed)) for seed in range(count)], 1)
    check_backward(
        Case(640, 640, batch=2, heads=heads, heads_kv=heads_kv, dim=dim, dtype=dtype, causal=True, bounds=bounds)
    )


@pytest.mark.cuda
@types
@dims
@pytest.mark.parametrize("heads, heads_kv", [(16, 8), (32, 8)])
def test_grouped_heads_with_work_for_every_multiprocessor(dtype, dim, heads, heads_kv):
    """One item has all query heads of its key head; with less work it has some of them."""
    bounds = torch.cat([document_bounds(random_lengths(1200, 5, seed)) for seed in range(heads)], 1)
    check_backward(
        Case(1200, 1200, batch=2, heads=heads, heads_kv=heads_kv, dim=dim, dtype=dtype, causal=True, bounds=bounds)
    )


@types
@dims
@pytest.mark.parametrize("heads_kv", [4, 1])
@pytest.mark.parametrize("seqlen_k", [1, 127, 128])
def test_one_key_tile_gives_dq_itself(dtype, dim, heads_kv, seqlen_k):
    """Without sums there is nothing to convert; rows that see none of the keys get zeros all the same."""
    check_backward(
        Case(
            700,
            seqlen_k,
            batch=2,
            heads=4,
            heads_kv=heads_kv,
            dim=dim,
            dtype=dtype,
            bounds=two_intervals(700, seqlen_k, dim),
        )
    )


@pytest.mark.parametrize("seqlen_q, seqlen_k, dim", [(4096, 4224, 64), (8191, 8192, 128), (8192, 8191, 64)])
def test_large_shapes(seqlen_q, seqlen_k, dim):
    heads = 2 if DEVICE.type == "cuda" else 1
    check_backward(
        Case(seqlen_q, seqlen_k, heads=heads, heads_kv=1, dim=dim, bounds=two_intervals(seqlen_q, seqlen_k, dim))
    )


@pytest.mark.cuda
@pytest.mark.large
@dims
def test_more_than_two_to_the_31_elements(dim):
    """Rows and keys near both ends of tensors whose offsets do not fit 32 bits, under a narrow window."""
    heads, seqlen, left, size = 16 * -(-1024 // dim), 140000, 127, 600
    assert heads * seqlen * dim > 2**31
    case = Case(seqlen, seqlen, heads=heads, heads_kv=heads // 16, dim=dim, causal=True, window=(left, -1))
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    q, dout = (torch.randn((1, seqlen, heads, dim), dtype=BF16, device=DEVICE, generator=generator) for _ in range(2))
    k, v = (
        torch.randn((1, seqlen, heads // 16, dim), dtype=BF16, device=DEVICE, generator=generator) for _ in range(2)
    )
    case.inputs = (q, k, v)
    forward = call(case, case.mask()).run()
    ours = call_backward(case, forward, dout, None).run()
    i, j = torch.arange(size, device=DEVICE)[:, None], torch.arange(size, device=DEVICE)[None]
    for begin in (0, 2**31 // (heads * dim) - size // 2, seqlen - size):
        # Rows of the slice from `left` on see all their keys in it; keys as far from its end are seen by all their rows
        # in it.
        first, last = left if begin > 0 else 0, size if begin + size == seqlen else size - left
        of_slice = [x[:, begin : begin + size].transpose(1, 2) for x in (q, k, v, dout, forward.out)]
        of_slice[1:3] = (x.repeat_interleave(16, dim=1) for x in of_slice[1:3])
        dlse = torch.zeros((1, heads, size), device=DEVICE)
        want = oracle.gradients(*of_slice[:4], dlse, ((j <= i) & (j >= i - left))[None, None], dim**-0.5, of_slice[4])
        want = (want[0], *(oracle.of_key_heads(x, heads // 16) for x in want[1:]))
        for name, expected, end in zip(("dq", "dk", "dv"), want, (size, last, last)):
            found = getattr(ours, name)[:, begin : begin + size].transpose(1, 2).double()
            error = (found - expected)[:, :, first:end].norm() / expected[:, :, first:end].norm()
            assert error < 6e-3, f"{name} of the slice at {begin} is off by {error:.1e}"


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_masks(group):
    for seed in range(group * PER_GROUP, (group + 1) * PER_GROUP):
        check_backward(random_case(seed), with_dlse=seed % 3 != 0)


@types
@dims
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
    strided = check_backward(case)
    contiguous = dataclasses.replace(case, layout="bshd", inputs=tuple(x.contiguous() for x in case.tensors()))
    dout, dlse = (x.contiguous() for x in gradient_inputs(case))
    forward = call(contiguous, contiguous.mask()).run()
    other = call_backward(contiguous, forward, dout, dlse, deterministic=True).run()
    assert_same_gradients(strided, other, f"{layout} against contiguous", case)


@dims
def test_the_gradient_of_an_empty_row_s_lse_counts_for_nothing(dim):
    """Whatever dlse holds there, infinities and NaN too."""
    case = Case(300, 300, dim=dim, causal=True, q_offset=-100)
    forward = call(case, case.mask()).run()
    dout, dlse = gradient_inputs(case)
    before = call_backward(case, forward, dout, dlse, deterministic=True).run()
    dlse[:, :, :50], dlse[:, :, 50:100] = float("nan"), float("inf")
    after = call_backward(case, forward, dout, dlse, deterministic=True).run()
    assert_same_gradients(before, after, "other dlse of empty rows", case)


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_dq_s_sums_two_vectors_a_row_and_the_plan(deterministic):
    heads, seqlen, dim = 32, 131072, 128
    q = torch.empty((1, seqlen, heads, dim), dtype=BF16, device=DEVICE)
    mask = Case(seqlen, seqlen, dim=dim, causal=True, bounds=document_bounds([seqlen // 4] * 4)).mask()
    call_of_all = Backward(Forward(q, q, q, mask), q, deterministic=deterministic, like=lambda x: x)
    needed = q.numel() * 4 + 2 * heads * seqlen * 4 + mask.plan_bytes()
    assert needed <= call_of_all.workspace.numel() <= 1.05 * needed


@dims
def test_a_row_s_nan_is_in_its_dq_alone(dim):
    """Sums of integers have none of their own."""
    case = Case(300, 300, heads=4, heads_kv=2, dim=dim, causal=True)
    forward = call(case, case.mask()).run()
    dout, dlse = gradient_inputs(case)
    before = call_backward(case, forward, dout, dlse, deterministic=True).run().dq.clone()
    dout[0, 170, 1, 5] = float("nan")
    after = call_backward(case, forward, dout, dlse, deterministic=True).run().dq
    row = torch.zeros(after.shape[:3], dtype=torch.bool, device=DEVICE)
    row[0, 170, 1] = True
    assert bool(after[row].isnan().all())
    assert same_bits(after[~row], before[~row])


@dims
@pytest.mark.parametrize("changed", ["k", "v"])
def test_infinities_are_in_dq_as_in_the_fast_mode(dim, changed):
    """An infinite k makes every score of its key -inf, so that only a product with its weight, 0, shows it."""
    case = Case(300, 300, heads=2, dim=dim, causal=True)
    q, k, v = (x.clone() for x in case.tensors())
    q[..., 0] = -1
    (k if changed == "k" else v)[0, 130, 1, 0] = float("inf")
    case = dataclasses.replace(case, inputs=(q, k, v))
    forward = call(case, case.mask()).run()
    dout, dlse = gradient_inputs(case)
    fast = call_backward(case, forward, dout, dlse).run().dq
    ours = call_backward(case, forward, dout, dlse, deterministic=True).run().dq
    lost = ~fast.isfinite().all(-1)
    assert bool(lost.any()) and bool((~lost).any())
    assert bool((ours.isnan().all(-1) == lost).all()) and bool(ours[~lost].isfinite().all())


@types
@dims
@pytest.mark.parametrize("factor", [1e-3, 1.0, 10.0])
def test_dq_beside_keys_of_large_values(dtype, dim, factor):
    """A few channels, and one key, are far larger than all else: the largest numbers set the unit of dq's sums."""
    case = Case(700, 900, batch=2, heads=4, heads_kv=2, dim=dim, dtype=dtype, causal=True)
    q, k, v = (x.clone() for x in case.tensors())
    k[..., 3] *= 16
    v[..., 5] *= 16
    k[:, 77], v[:, 77] = k[:, 77] * 8, v[:, 77] * 32
    q[..., 3] /= 16
    inputs = tuple((x * factor).to(dtype) for x in (q / factor, k, v))
    check_backward(dataclasses.replace(case, inputs=inputs, scale=1 / (factor * dim**0.5)))


@dims
def test_nothing_to_do(dim):
    for case in (
        Case(130, 0, dim=dim),
        Case(0, 130, dim=dim),
        Case(130, 130, batch=0, dim=dim),
        Case(0, 0, batch=0, dim=dim),
    ):
        for deterministic in (False, True):
            forward = call(case, case.mask()).run()
            ours = call_backward(case, forward, *gradient_inputs(case), deterministic=deterministic).run()
            assert all(bool((x == 0).all()) for x in ours.gradients()), case


@pytest.mark.cuda
def test_what_the_kernels_do_not_take_is_named():
    case = Case(128, 128, dim=64)
    forward = call(case, case.mask()).run()
    dout, dlse = gradient_inputs(case)
    wrongs = [(torch.randn((1, 128, 2, 128), device=DEVICE).to(BF16)[..., ::2], "dout has stride 2")]
    if kernels.set_on(DEVICE) == "sm90":  # by TMA; the others read rows wherever they lie
        wrongs.append((dout[:, :1].expand_as(dout), "dout is expanded"))
    for wrong, words in wrongs:
        with pytest.raises(CallError, match=words):
            call_backward(case, forward, wrong, dlse)


@types
@dims
@pytest.mark.parametrize("causal", [False, True])
def test_documents_do_not_depend_on_their_neighbours(dtype, dim, causal):
    """Their gradients, bit for bit, when other documents' values change: those of keys by any factor, dq as long as the
    largest K and V of a head, the unit of its sums, stay as they are."""
    lengths = [200, 70, 130, 400, 224]
    case = Case(1024, 1024, dim=dim, dtype=dtype, causal=causal, bounds=document_bounds(lengths, causal))
    dout, dlse = gradient_inputs(case)
    before = call_backward(case, call(case, case.mask()).run(), dout, dlse, deterministic=True).run()
    for n in range(len(lengths)):
        begin, end = sum(lengths[:n]), sum(lengths[: n + 1])
        others = torch.ones(1024, dtype=torch.bool, device=DEVICE)
        others[begin:end] = False
        drawn, reordered = [x.clone() for x in (*case.tensors(), dout)], [x.clone() for x in (*case.tensors(), dout)]
        for x, factor in zip(drawn, (3.0, 5.0, -7.0, 2.0)):
            x[:, others] = (torch.randn_like(x[:, others]) * factor).to(dtype)
        for x in reordered:
            x[:, others] = -x[:, others].flip(1)
        for changed, names in ((drawn, ("dk", "dv")), (reordered, ("dq", "dk", "dv"))):
            other = dataclasses.replace(case, inputs=tuple(changed[:3]))
            after = call_backward(other, call(other, other.mask()).run(), changed[3], dlse, deterministic=True).run()
            for name in names:
                assert same_bits(getattr(before, name)[:, begin:end], getattr(after, name)[:, begin:end]), (
                    f"{name} of document {n} changed with its neighbours; {case}"
                )


@dims
def test_a_head_does_not_depend_on_the_batch(dim):
    """A head has equal values alone and inside of a larger call."""
    bounds = document_bounds(random_lengths(777, 6))
    case = Case(777, 777, batch=3, heads=4, heads_kv=4, dim=dim, causal=True, bounds=bounds)
    dout, dlse = gradient_inputs(case)
    together = call_backward(case, call(case, case.mask()).run(), dout, dlse, deterministic=True).run()
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
    single = call_backward(
        alone, call(alone, alone.mask()).run(), dout[2:, :, 3:], dlse[2:, 3:], deterministic=True
    ).run()
    for name in ("dq", "dk", "dv"):
        assert same_bits(getattr(single, name), getattr(together, name)[2:, :, 3:]), name


@pytest.mark.cuda
@dims
@pytest.mark.parametrize("kind", ["full", "causal", "documents", "causal documents", "window"])
def test_thirty_deterministic_runs(dim, kind):
    """More items than multiprocessors, so that their order differs; then fewer CTAs."""
    more = {
        "full": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window": (500, -1)},
        "documents": {"bounds": document_bounds(random_lengths(2048, 5), causal=False)},
        "causal documents": {"causal": True, "bounds": document_bounds(random_lengths(2048, 5))},
    }[kind]
    case = Case(2048, 2048, batch=2, heads=16, heads_kv=8, dim=dim, **more)
    mask = case.mask()
    plan = Plan(mask)
    forward = call(case, mask, plan=plan).run()
    dout, dlse = gradient_inputs(case)
    first = call_backward(case, forward, dout, dlse, plan=plan, deterministic=True).run()
    again = call_backward(case, forward, dout, dlse, plan=plan, deterministic=True)
    for _ in range(30):
        assert_same_gradients(first, again.poison().run(), "run again", case)
    for max_ctas in (132, 131, 66, 1):
        fewer = call_backward(case, forward, dout, dlse, plan=plan, deterministic=True, max_ctas=max_ctas).run()
        assert_same_gradients(first, fewer, f"with at most {max_ctas} CTAs", case)


@pytest.mark.cuda
@dims
@pytest.mark.parametrize("heads_kv", [1, 4])
def test_fewer_ctas(dim, heads_kv):
    """Both directions, deterministic or not, where items share a key head's query heads: 1/4 and 1/2 of them each."""
    case = Case(
        1100,
        1100,
        batch=2,
        heads=4 * heads_kv,
        heads_kv=heads_kv,
        dim=dim,
        causal=True,
        bounds=document_bounds(random_lengths(1100, 5)),
    )
    mask = case.mask()
    plan = Plan(mask)
    forward = call(case, mask, plan=plan).run()
    dout, dlse = gradient_inputs(case)
    everything = call_backward(case, forward, dout, dlse, plan=plan, deterministic=True).run()
    for max_ctas in (1000, 131, 2, 1):
        assert_same(
            forward, call(case, mask, plan=plan, max_ctas=max_ctas).run(), f"with at most {max_ctas} CTAs", case
        )
        fewer = call_backward(case, forward, dout, dlse, plan=plan, deterministic=True, max_ctas=max_ctas).run()
        assert_same_gradients(everything, fewer, f"with at most {max_ctas} CTAs", case)
        check_gradients(
            case, forward, dout, dlse, call_backward(case, forward, dout, dlse, plan=plan, max_ctas=max_ctas).run()
        )


@pytest.mark.cuda
@types
@pytest.mark.parametrize("kind", ["full", "causal", "documents", "hidden keys", "nothing"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(700, 1300), (1300, 700), (129, 65), (2048, 2048)])
@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_pairs_of_ctas(dtype, kind, seqlen_q, seqlen_k, dim, deterministic):
    """Head dims 192 and 256 run in pairs of CTAs, unless they may have one CTA alone: dk and dv, and in deterministic
    mode dq, have the same bits either way, of key tiles that no row sees, too."""
    hidden = torch.full((1, 1, seqlen_k, 1), seqlen_q, dtype=torch.int32, device=DEVICE)
    for first, last in ((0, 50), (128, 400), (512, 576), (seqlen_k - 150, seqlen_k)):
        hidden[:, :, first:last] = 0
    more = {
        "full": {},
        "causal": {"causal": True},
        "documents": {"causal": True, "bounds": document_bounds(random_lengths(seqlen_k, 4)).clamp(max=seqlen_q)},
        "hidden keys": {"causal": True, "bounds": hidden},
        "nothing": {"causal": True, "bounds": torch.zeros_like(hidden)},
    }[kind]
    case = Case(seqlen_q, seqlen_k, batch=2, heads=3, heads_kv=3, dim=dim, dtype=dtype, **more)
    plan = Plan(case.mask())
    forward = call(case, case.mask(), plan=plan).run()
    dout, dlse = gradient_inputs(case)
    options = {"plan": plan, "deterministic": deterministic}
    alone = call_backward(case, forward, dout, dlse, **options, max_ctas=1).run()
    kernel = explained(alone, True)
    for max_ctas in (2, 3, 6, 0):
        pairs = call_backward(case, forward, dout, dlse, **options, max_ctas=max_ctas)
        assert kernel["arch"] != "sm90" or explained(pairs, True)["instance"] != kernel["instance"], kernel
        for _ in range(3):
            pairs.poison().run()
            names = ("dq", "dk", "dv") if deterministic else ("dk", "dv")
            assert_same_gradients(alone, pairs, f"with {max_ctas} CTAs", case, names)
        check_gradients(case, forward, dout, dlse, pairs)


def few_rows_bounds(seqlen_q, seqlen_k):
    """LTS and UTE under which a key tile sees no rows, some of one tile of 64 or 128 rows, of either parity, of two
    tiles, or all rows."""
    seen = [(0, 0), (300, 301), (0, 64), (64, 128), (128, 256), (0, 128), (192, 320), (0, seqlen_q)]
    vectors = [[end, begin] for begin, end in (seen[key // 128 % len(seen)] for key in range(seqlen_k))]
    return ints(vectors)[None, None].contiguous()


@pytest.mark.cuda
@types
@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents", "few rows"])
@pytest.mark.parametrize(
    "batch, heads, seqlen_q, seqlen_k", [(1, 4, 2048, 2048), (2, 3, 1500, 1300), (1, 3, 1024, 129), (1, 3, 4100, 3900)]
)
@pytest.mark.parametrize("dim", [40, 64, 112, 128])
def test_two_ctas_share_rows(dtype, kind, batch, heads, seqlen_q, seqlen_k, dim):
    """Two CTAs have half of the row tiles each, in fast mode, of few key tiles with many rows, unless there may be one
    CTA alone: dk and dv have the same bits in every run and with any other number."""
    more = {
        "full": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window": (150, -1)},
        "documents": {"causal": True, "bounds": document_bounds(random_lengths(seqlen_k, 4)).clamp(max=seqlen_q)},
        "few rows": {"bounds": few_rows_bounds(seqlen_q, seqlen_k)},
    }[kind]
    case = Case(seqlen_q, seqlen_k, batch=batch, heads=heads, heads_kv=heads, dim=dim, dtype=dtype, **more)
    check_backward(case)
    plan = Plan(case.mask())
    forward = call(case, case.mask(), plan=plan).run()
    dout, dlse = gradient_inputs(case)
    ours = call_backward(case, forward, dout, dlse, plan=plan).run()
    key_tiles = batch * heads * -(-seqlen_k // 128)
    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    least_rows = 1024 if key_tiles <= multiprocessors / 2 else {"causal": 2048, "documents": 4096}.get(kind, math.inf)
    is_shared = key_tiles <= multiprocessors and seqlen_q >= least_rows
    assert shares_rows(ours) == (is_shared and explained(ours, True)["arch"] == "sm90")
    for max_ctas in (2, 3, 7, 0):
        fewer = call_backward(case, forward, dout, dlse, plan=plan, max_ctas=max_ctas)
        for _ in range(3):
            fewer.poison().run()
            assert_same_gradients(ours, fewer, f"with at most {max_ctas} CTAs", case, ("dk", "dv"))
        check_gradients(case, forward, dout, dlse, fewer)
    alone = call_backward(case, forward, dout, dlse, plan=plan, max_ctas=1).run()
    assert not shares_rows(alone)
    check_gradients(case, forward, dout, dlse, alone)


@pytest.mark.cuda
@dims
@pytest.mark.parametrize("deterministic", [False, True])
def test_side_streams(dim, deterministic):
    """One plan, calls on several streams at once."""
    case = Case(
        2000, 2000, batch=2, heads=8, heads_kv=8, dim=dim, causal=True, bounds=document_bounds(random_lengths(2000, 6))
    )
    mask = case.mask()
    plan = Plan(mask)
    forward = call(case, mask, plan=plan).run()
    dout, dlse = gradient_inputs(case)
    expected = call_backward(case, forward, dout, dlse, plan=plan, deterministic=deterministic).run()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    calls = []
    for stream in streams:
        with torch.cuda.stream(stream):
            calls.append(call_backward(case, forward, dout, dlse, plan=plan, deterministic=deterministic).run())
    torch.cuda.synchronize()
    for other in calls:
        assert_same_gradients(
            expected, other, "on a side stream", case, ("dq", "dk", "dv") if deterministic else ("dk", "dv")
        )


@pytest.mark.cuda
@dims
@pytest.mark.parametrize("own_plan", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_capture(dim, own_plan, deterministic):
    """A replayed graph of planner, forward and backward follows the bounds and inputs that are then in the tensors."""
    case = Case(
        1500, 1500, batch=2, heads=2, heads_kv=2, dim=dim, causal=True, bounds=document_bounds(random_lengths(1500, 5))
    )
    mask = case.mask()
    plan = None if own_plan else Plan(mask, build=False)
    forward = call(case, mask, plan=plan)
    dout, dlse = gradient_inputs(case)
    captured = call_backward(case, forward, dout, dlse, plan=plan, deterministic=deterministic)
    ordered = ("dq", "dk", "dv") if deterministic else ("dk", "dv")

    def work():
        if plan is not None:
            plan.build()
        forward.run()
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
        for x in (*case.tensors(), dout, dlse):
            x.normal_()
        captured.poison()
        graph.replay()
        torch.cuda.synchronize()
        expected = call_backward(case, call(case, case.mask()).run(), dout, dlse, deterministic=deterministic).run()
        assert_same_gradients(expected, captured, f"replay {seed}", case, ordered)


@pytest.mark.cuda
@pytest.mark.large
def test_nothing_waits_or_allocates():
    """A call returns while the stream is still busy, and takes no memory from the allocator that torch uses."""
    case = Case(4096, 4096, heads=8, heads_kv=8, dim=128, causal=True)
    mask = case.mask()
    plan = Plan(mask)
    forward = call(case, mask, plan=plan).run()
    ours = call_backward(case, forward, *gradient_inputs(case), plan=plan).run()
    assert_neither_waits_nor_allocates(ours.run)
