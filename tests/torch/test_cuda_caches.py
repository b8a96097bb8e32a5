# SPDX-License-Identifier: Apache-2.0
"""Attention over KV caches on a GPU: against the CPU's, in CUDA graphs, and what is refused. Needs
FLASHMASK_TEST_DEVICE=cuda."""

import json
import math
import os
import re

import pytest
import torch
from devices import cuda_only
from flashmask import masks
from flashmask.errors import UnsupportedError
from flashmask.inference import CachePlan, KvCache, SequenceMask, append_kv, explain, flashmask_with_kvcache

pytestmark = cuda_only
FOR_GOOD = 2**31 - 1
PAGE, PAGES = 16, 40


def draw(batch=4, heads_kv=2, group=4, dim=64, rows=3, dtype=torch.bfloat16):
    k, v = (torch.randn(PAGES, PAGE, heads_kv, dim).to(dtype) for _ in range(2))
    table = torch.randperm(PAGES).view(batch, -1).int()
    q = torch.randn(batch, rows, heads_kv * group, dim).to(dtype)
    return q, k, v, table


def on(device, q, k, v, table, lengths):
    return q.to(device), KvCache(k.to(device), v.to(device), table.to(device), lengths.to(device))


def some_masks(k):
    bounds = torch.randint(0, 160, (PAGES, PAGE, 1, 1), dtype=torch.int32)
    bounds[torch.rand(bounds.shape) < 0.6] = FOR_GOOD
    tail, depth = masks.draft_tree(torch.tensor([[-1, 0, 0]] * 4))
    return {
        "causal": SequenceMask(),
        "window": SequenceMask(window_size=(20, 0)),
        "bounds": SequenceMask(bounds=bounds, key_layout="pages"),
        "tree": SequenceMask(tail=tail, tail_depth=depth, window_size=(50, 0)),
        "blocks": SequenceMask(block_mask=torch.tensor([[[[0, 1], [1, 0]], [[1, 1], [0, 1]]]], dtype=torch.bool)),
    }


def moved(mask, device):
    names = ("bounds", "tail", "tail_lens", "tail_depth", "q_pos", "k_pos", "block_mask")
    tensors = {name: None if getattr(mask, name) is None else getattr(mask, name).to(device) for name in names}
    return SequenceMask(mask.causal, mask.window_size, **tensors, key_layout=mask.key_layout)


@pytest.mark.parametrize("name", ["causal", "window", "bounds", "tree", "blocks"])
def test_the_cpu_gives_the_same(name):
    q, k, v, table = draw()
    lengths = torch.tensor([160, 0, 2, 77], dtype=torch.int32)
    mask = some_masks(k)[name]
    want, want_lse = flashmask_with_kvcache(
        q.float(), KvCache(k.float(), v.float(), table, lengths), mask, return_softmax_lse=True
    )
    device_q, cache = on("cuda", q, k, v, table, lengths)
    out, lse = flashmask_with_kvcache(device_q, cache, moved(mask, "cuda"), return_softmax_lse=True)
    torch.testing.assert_close(out.cpu().float(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu(), want_lse, atol=1e-3, rtol=1e-3)


def cpu_of(cache):
    """The cache in float32, in host memory."""
    return KvCache(cache.k.float().cpu(), cache.v.float().cpu(), cache.page_table.cpu(), cache.seqlens.cpu())


@pytest.mark.parametrize("name", ["causal", "drafts", "window", "bounds", "tree", "blocks"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (72, 40)])
@pytest.mark.parametrize("group", [1, 4, 6])
def test_prefill_beside_decode(name, dims, group):
    """Tall tiles, with requests of many rows, of few, of none, and of more rows than keys."""
    dim, dim_v = dims
    cache = long_cache(dim, (800, 300, 513, 40, 0), dim_v=dim_v)
    ends = torch.tensor([0, 300, 301, 350, 400, 420], dtype=torch.int32)
    q = torch.randn(420, 2 * group, dim, device="cuda").bfloat16()
    mask = invariant_masks(cache)[name]
    out, lse = flashmask_with_kvcache(q, cache, mask, cu_seqlens_q=ends.cuda(), return_softmax_lse=True)
    want, want_lse = flashmask_with_kvcache(
        q.float().cpu(), cpu_of(cache), moved(mask, "cpu"), cu_seqlens_q=ends, return_softmax_lse=True
    )
    torch.testing.assert_close(out.cpu().float(), want, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu(), want_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["causal", "bounds", "tree", "blocks"])
def test_one_graph_serves_all_lengths(name):
    q, k, v, table = draw()
    lengths = torch.full((4,), 160, dtype=torch.int32)
    device_q, cache = on("cuda", q, k, v, table, lengths)
    mask = moved(some_masks(k)[name], "cuda")
    plan, out = CachePlan(4, 12, 160, 8, 2, 64, device="cuda"), torch.empty_like(device_q)
    plan.update(mask, cache, rows=3)
    flashmask_with_kvcache(device_q, cache, mask, plan, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # fails if anything is read back
        plan.update(mask, cache, rows=3)
        flashmask_with_kvcache(device_q, cache, mask, plan, out=out)
    for _ in range(8):
        cache.seqlens.copy_(torch.randint(0, 161, (4,)))
        cache.page_table.copy_(torch.randperm(PAGES).view(4, -1))
        device_q.normal_()
        graph.replay()
        assert torch.equal(out, flashmask_with_kvcache(device_q, cache, mask))


def padded(x, nan=math.nan):
    """x in memory where no row begins on a boundary, between NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), nan, dtype=x.dtype, device=x.device)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_bits_do_not_depend_on_pages_or_ctas(dim):
    q, k, v, table = draw(dim=dim)
    lengths = torch.tensor([160, 5, 99, 128], dtype=torch.int32)
    device_q, cache = on("cuda", q, k, v, table, lengths)
    want = flashmask_with_kvcache(device_q, cache)
    gathered = [x.to("cuda")[table.long().to("cuda")].view(4, 160, 2, dim).contiguous() for x in (k, v)]
    for x in gathered:  # what lies past the lengths is never looked at
        for rows, length in zip(x, lengths.tolist()):
            rows[length:] = math.nan

    def in_pages(size, change=lambda x: x, **layout):
        pages = torch.arange(640 // size, device="cuda").int().view(4, -1)
        return KvCache(*(change(x.view(-1, size, 2, dim)) for x in gathered), pages, cache.seqlens, **layout)

    for other in (
        KvCache(*gathered, seqlens=cache.seqlens),
        KvCache(*map(padded, gathered), seqlens=cache.seqlens),
        *(in_pages(size) for size in (1, 4, 20, 160)),
        *(in_pages(size, padded) for size in (1, 32)),
        in_pages(32, lambda x: x.transpose(1, 2).contiguous(), layout="HND"),
    ):
        assert torch.equal(want, flashmask_with_kvcache(device_q, other))
        out = padded(torch.empty_like(want))
        assert torch.equal(want, flashmask_with_kvcache(padded(device_q), other, out=out))
    assert torch.equal(want, flashmask_with_kvcache(device_q, cache, max_ctas=3))


def test_two_streams_with_a_plan_each():
    q, k, v, table = draw()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for n, stream in enumerate(streams):
        device_q, cache = on("cuda", q + n, k, v, table, torch.full((4,), 150, dtype=torch.int32))
        plan = CachePlan(4, 12, 160, 8, 2, 64, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                plan.update(None, cache, rows=3)
                out = flashmask_with_kvcache(device_q, cache, plan=plan)
        results.append((out, device_q, cache))
    torch.cuda.synchronize()
    for out, device_q, cache in results:
        assert torch.equal(out, flashmask_with_kvcache(device_q, cache))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_append_writes_what_the_cpu_writes(dtype):
    k, v = (torch.zeros(PAGES, PAGE, 2, 24).to(dtype) for _ in range(2))
    table, lengths = torch.randperm(PAGES).view(4, -1).int(), torch.tensor([3, 0, 160, 17], dtype=torch.int32)
    scales = {n: torch.rand(PAGES, 1, 1) + 0.5 for n in ("k_scale", "v_scale")} if k.element_size() == 1 else {}
    rows = [torch.randn(4, 5, 2, 24).to(torch.float32 if scales else dtype) for _ in range(2)]
    kept = []
    for device in ("cpu", "cuda"):
        given = {name: x.to(device) for name, x in scales.items()}
        cache = KvCache(k.clone().to(device), v.clone().to(device), table.to(device), lengths.to(device), **given)
        append_kv(*(x.to(device) for x in rows), cache)
        kept.append([x.cpu().view(torch.uint8) for x in (cache.k.contiguous(), cache.v.contiguous())])
    assert all(torch.equal(a, b) for a, b in zip(*kept))


@pytest.mark.parametrize("scale_shape", [(PAGES, PAGE, 1), (PAGES, PAGE, 2), (PAGES, 1, 1), (PAGES, 1, 2)])
@pytest.mark.parametrize("by_slots", [False, True])
def test_append_writes_the_scales_that_the_cpu_writes(scale_shape, by_slots):
    """Scales of tokens and of pages, which grow in several appends; slots come in any order."""
    _, k, v, table = draw()
    first, steps = torch.tensor([0, 15, 40, 77]), [(40, 1.0), (1, 30.0), (7, 4.0), (1, 1e4)]
    tokens = [[factor * torch.randn(4, rows, 2, 64) for _ in range(2)] for rows, factor in steps]
    orders, kept = [torch.randperm(rows) for rows, _ in steps], []
    for device in ("cpu", "cuda"):
        stored, scales = (
            x.to(device) for x in (torch.stack((k, v)).to(torch.float8_e4m3fn), torch.ones(2, *scale_shape))
        )
        lengths = first.int().to(device)
        cache = KvCache(*stored, table.to(device), lengths, *scales)
        for (rows, _), new, order in zip(steps, tokens, orders):
            at = lengths.cpu()[:, None] + torch.arange(rows)
            slots = (table.gather(1, at // PAGE) * PAGE + at % PAGE).to(device)
            lengths += rows
            if by_slots:
                append_kv(*(x[:, order].to(device) for x in new), cache, slots=slots[:, order], write_scales=True)
            else:
                append_kv(*(x.to(device) for x in new), cache, write_scales=True)
        kept.append([stored.view(torch.uint8).cpu(), scales.cpu()])
    assert all(torch.equal(a, b) for a, b in zip(*kept)) and not torch.equal(kept[0][1], torch.ones(2, *scale_shape))


FLOAT8 = pytest.mark.skipif(
    os.environ.get("FLASHMASK_KERNELS") == "sm90", reason="kernels that read float8 for many rows alone"
)
IS_HOPPER = os.environ.get("FLASHMASK_KERNELS", "auto") in ("auto", "sm90")


def in_float8(x, scale):
    """x over its scale, as a float8 cache holds it."""
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def float8_cache(cache, scale_shape):
    """The cache in float8, whose scales differ as the shape says."""
    scales = [torch.rand(scale_shape, device=cache.k.device) / 64 + 1e-3 for _ in range(2)]
    stored = [in_float8(x, scale[..., None]) for x, scale in zip((cache.k, cache.v), scales)]
    return KvCache(*stored, cache.page_table, cache.seqlens, *scales)


def dequantised(cache):
    """Its values in float32, in host memory."""
    scaled = ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
    wide = [(x.float() * scale[..., None]).cpu() for x, scale in scaled]
    return KvCache(*wide, cache.page_table.cpu(), cache.seqlens.cpu())


def kernel_of(q, cache, *arguments, **options):
    return json.loads(explain(q, cache, *arguments, **options))["kernel"]


@FLOAT8
@pytest.mark.parametrize("scale_shape", [(1,), (2,), (PAGES, 1, 1), (PAGES, PAGE, 2)])
@pytest.mark.parametrize(
    "dim, rows, name",
    [
        (64, 1, "causal"),
        (128, 3, "bounds"),
        (128, 9, "window"),
        (256, 3, "tree"),
        (64, 40, "tree"),
        (96, 33, "blocks"),
        (128, 50, "bounds"),
    ],
)
def test_float8_caches(dim, rows, name, scale_shape):
    q, k, v, table = draw(dim=dim, rows=rows)
    lengths = torch.tensor([160, 0, 9, 77], dtype=torch.int32)
    device_q, cache = on("cuda", q, k, v, table, lengths)
    cache, mask = float8_cache(cache, scale_shape), some_masks(k)[name]
    want = flashmask_with_kvcache(q.float(), dequantised(cache), mask)
    planned = moved(mask, "cuda")
    out = flashmask_with_kvcache(device_q, cache, planned)
    torch.testing.assert_close(out.cpu().float(), want, atol=2e-2, rtol=2e-2)
    plan = CachePlan(4, 4 * rows, 160, 8, 2, dim, device="cuda", float8=True)
    plan.update(planned, cache, rows=rows)
    assert torch.equal(out, flashmask_with_kvcache(device_q, cache, planned, plan))
    assert torch.equal(out, flashmask_with_kvcache(device_q, cache, planned, max_ctas=5))


@FLOAT8
@pytest.mark.parametrize("rows", [1, 20])
def test_a_graph_over_a_float8_cache_serves_all_lengths(rows):
    q, k, v, table = draw(dim=128, rows=rows)
    lengths = torch.full((4,), 160, dtype=torch.int32)
    device_q, cache = on("cuda", q, k, v, table, lengths)
    cache = float8_cache(cache, (PAGES, PAGE, 2))
    plan, out = CachePlan(4, 4 * rows, 160, 8, 2, 128, device="cuda", float8=True), torch.empty_like(device_q)
    plan.update(None, cache, rows=rows)
    flashmask_with_kvcache(device_q, cache, plan=plan, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(None, cache, rows=rows)
        flashmask_with_kvcache(device_q, cache, plan=plan, out=out)
    for some in ([1, 2, 3, 4], [160, 0, 64, 128], [0, 0, 0, 7]):
        cache.seqlens.copy_(torch.tensor(some))
        graph.replay()
        assert torch.equal(out, flashmask_with_kvcache(device_q, cache))


@pytest.mark.parametrize("name", ["causal", "drafts", "window", "bounds", "tree", "blocks"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40)])
@pytest.mark.parametrize("by", ["tensor", "head", "page", "token and head"])
def test_float8_prefill_beside_decode(name, dims, by):
    """Tall tiles over e4m3, with requests of many rows, of few, of none, and of more rows than keys. Scales are far
    apart, as no key that a row sees may cost another its digits."""
    dim, dim_v = dims
    wide = long_cache(dim, (800, 300, 513, 40, 0), dim_v=dim_v)
    pages, page = wide.k.shape[:2]
    shape = {"tensor": (1,), "head": (2,), "page": (pages, 1, 1), "token and head": (pages, page, 2)}[by]
    scales = [2.0 ** torch.randint(-20, most, shape, device="cuda") for most in (-3, 11)]
    stored = [in_float8(x.float() * 4, torch.ones(1, device="cuda")) for x in (wide.k, wide.v)]
    cache, mask = KvCache(*stored, wide.page_table, wide.seqlens, *scales), invariant_masks(wide)[name]
    ends = torch.tensor([0, 300, 301, 350, 400, 420], dtype=torch.int32)
    q = torch.randn(420, 8, dim, device="cuda").bfloat16()
    options = {"cu_seqlens_q": ends.cuda()}
    out, lse = flashmask_with_kvcache(q, cache, mask, return_softmax_lse=True, **options)
    exact = [(x.double() * scale.double()[..., None]).cpu() for x, scale in zip(stored, scales)]
    double = KvCache(*exact, wide.page_table.cpu(), wide.seqlens.cpu())
    want, want_lse = flashmask_with_kvcache(
        q.double().cpu(), double, moved(mask, "cpu"), cu_seqlens_q=ends, return_softmax_lse=True, backend="reference"
    )
    largest = want.abs().amax(-1, keepdim=True)
    assert ((out.cpu().double() - want).abs() <= 2e-2 * largest + 1e-30).all()
    torch.testing.assert_close(lse.cpu().double(), want_lse, atol=1e-3, rtol=1e-3)
    assert kernel_of(q, cache, mask, **options).startswith("sm90.") == IS_HOPPER
    assert torch.equal(out, flashmask_with_kvcache(q, cache, mask, max_ctas=5, **options))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scale_shape", [(1,), (2,)])
def test_large_scales_of_float8_values_and_rows_that_see_nothing(dim, scale_shape):
    """A power of two as all values' factor changes no other bit, and rows before the first key stay zeros."""
    q, k, v, table = draw(dim=dim, rows=40)
    device_q, cache = on("cuda", q, k, v, table, torch.tensor([5, 0, 39, 40], dtype=torch.int32))
    stored = [in_float8(x, torch.ones(1, device="cuda")) for x in (cache.k, cache.v)]

    def out_with(factor):
        scales = [torch.full(scale_shape, each, device="cuda") for each in (1.0, factor)]
        return flashmask_with_kvcache(device_q, KvCache(*stored, cache.page_table, cache.seqlens, *scales))

    out = out_with(1024.0)
    assert torch.isfinite(out).all() and (out[0, :35] == 0).all() and (out[0, 35:] != 0).any()
    assert torch.equal(out, 1024 * out_with(1.0))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scale_shape", [(1,), (2,)])
def test_bits_over_float8_do_not_depend_on_pages_or_ctas(dim, scale_shape):
    """Copies by TMA, by 16 bytes and by bytes; factors of a head, and the same ones for each key."""
    q, k, v, table = draw(dim=dim, rows=40)
    device_q, cache = on("cuda", q, k, v, table, torch.tensor([160, 5, 99, 128], dtype=torch.int32))
    cache = float8_cache(cache, scale_shape)
    scales, nan = (cache.k_scale, cache.v_scale), 0x7F
    want = flashmask_with_kvcache(device_q, cache)
    stored = (x.view(torch.uint8) for x in (cache.k, cache.v))
    gathered = [x[table.long().to("cuda")].view(4, 160, 2, dim).contiguous() for x in stored]
    for x in gathered:  # what lies past the lengths is never looked at
        for rows, length in zip(x, cache.seqlens.tolist()):
            rows[length:] = nan

    def in_pages(size, change=lambda x: x, scales=scales, **layout):
        pages = torch.arange(640 // size, device="cuda").int().view(4, -1)
        return KvCache(*(change(x.view(-1, size, 2, dim)) for x in gathered), pages, cache.seqlens, *scales, **layout)

    def padded_with_nan(x):
        return padded(x, nan)

    for other in (
        KvCache(*gathered, None, cache.seqlens, *scales),
        KvCache(*map(padded_with_nan, gathered), None, cache.seqlens, *scales),
        *(in_pages(size) for size in (1, 4, 20, 32, 160)),
        *(in_pages(size, padded_with_nan) for size in (1, 32)),
        in_pages(32, lambda x: x.transpose(1, 2).contiguous(), layout="HND"),
        in_pages(16, scales=[x.expand(PAGES, PAGE, 2).contiguous() for x in scales]),
    ):
        assert torch.equal(want, flashmask_with_kvcache(device_q, other))
    assert torch.equal(want, flashmask_with_kvcache(device_q, cache, max_ctas=3))


@pytest.mark.skipif(not IS_HOPPER, reason="kernels that read float8 for any rows")
def test_rows_and_head_dims_choose_the_kernels_of_float8(monkeypatch):
    def call(rows, dim):
        q, k, v, table = draw(dim=dim, rows=rows)
        device_q, cache = on("cuda", q, k, v, table, torch.full((4,), 9, dtype=torch.int32))
        return device_q, float8_cache(cache, (1,))

    assert kernel_of(*call(9, 64)) == "sm90.decode.bf16.d64.dv64.c2.e4m3"
    assert kernel_of(*call(9, 96)) == "sm90.decode.bf16.d128.dv128.c2.e4m3"
    others = [
        (call(8, 64), {}, "at most 32 each, kernels 'sm80' read it"),
        (call(9, 256), {}, "with head_dim 256 and head_dim_v 256 kernels 'sm80' read it"),
        (call(9, 64), {"batch_invariant": True}, "with batch_invariant kernels 'sm80' read it"),
    ]
    monkeypatch.delenv("FLASHMASK_KERNELS", raising=False)
    for given, options, _ in others:
        assert kernel_of(*given, **options).startswith("sm80.decode.")
    monkeypatch.setenv("FLASHMASK_KERNELS", "sm90")
    for given, options, why in others:
        with pytest.raises(UnsupportedError, match=why):
            flashmask_with_kvcache(*given, **options)


@FLOAT8
def test_a_plan_says_which_caches_it_is_for():
    q, k, v, table = draw()
    device_q, cache = on("cuda", q, k, v, table, torch.full((4,), 9, dtype=torch.int32))
    small = float8_cache(cache, (1,))
    plans = {float8: CachePlan(4, 12, 160, 8, 2, 64, device="cuda", float8=float8) for float8 in (False, True)}
    with pytest.raises(ValueError, match="the cache is float8_e4m3 and the plan is for one of 16 or 32 bits"):
        plans[False].update(None, small, rows=3)
    with pytest.raises(ValueError, match="the cache is bfloat16 and the plan is for one of float8_e4m3"):
        plans[True].update(None, cache, rows=3)
    assert json.loads(explain(device_q, small))["kernel"].endswith(".e4m3")


def test_refusals_say_what_reads_the_cache():
    q, k, v, table = draw()
    device_q, cache = on("cuda", q, k, v, table, torch.full((4,), 9, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="q is float32; cast to bfloat16 or float16"):
        wide = KvCache(cache.k.float(), cache.v.float(), cache.page_table, cache.seqlens)
        flashmask_with_kvcache(device_q.float(), wide)
    plan = CachePlan(4, 12, 160, 8, 2, 64, device="cuda")
    with pytest.raises(ValueError, match="the plan was never built"):
        flashmask_with_kvcache(device_q, cache, plan=plan)
    plan.update(None, cache, rows=3)
    with pytest.raises(ValueError, match="the number of rows .rows of plan.update. is another"):
        flashmask_with_kvcache(device_q[:, :2], cache, plan=plan)
    with pytest.raises(ValueError, match="causal, window_size or the layout of the mask is another"):
        flashmask_with_kvcache(device_q, cache, SequenceMask(window_size=(3, 0)), plan)
    with pytest.raises(ValueError, match="batch_invariant of the call is 1 and of the plan 0"):
        flashmask_with_kvcache(device_q, cache, plan=plan, batch_invariant=True)
    invariant = CachePlan(4, 12, 160, 8, 2, 64, batch_invariant=True, split_size=128, device="cuda")
    invariant.update(None, cache, rows=3)
    with pytest.raises(ValueError, match="split_size of the call is 256 and of the plan 128"):
        flashmask_with_kvcache(device_q, cache, plan=invariant, batch_invariant=True, split_size=256)
    with pytest.raises(ValueError, match="batch_invariant of the call is 0 and of the plan 1"):
        flashmask_with_kvcache(device_q, cache, plan=invariant, split_size=128)
    small = CachePlan(4, 12, 160, 8, 2, 64, max_total_keys=100, batch_invariant=True, split_size=128, device="cuda")
    small.update(None, cache, rows=3)
    with pytest.raises(UnsupportedError, match="2 splits of split_size 128; the plan's max_keys has 1"):
        flashmask_with_kvcache(device_q, cache, plan=small, batch_invariant=True, split_size=128)


# --- batch_invariant --------------------------------------------------------------------------------

LENGTHS = (3000, 256, 1, 700)
INVARIANT = {"batch_invariant": True, "split_size": 256}


def run(q, cache, mask=None, **options):
    return flashmask_with_kvcache(q, cache, mask, return_softmax_lse=True, **INVARIANT | options)


def same(a, b):
    return all(map(torch.equal, a, b))


def long_cache(dim, lengths=LENGTHS, page=64, dim_v=None):
    pages = -(-max(lengths) // page)
    k, v = (torch.randn(len(lengths) * pages, page, 2, d, device="cuda").bfloat16() for d in (dim, dim_v or dim))
    table = torch.randperm(len(k), device="cuda").int().view(len(lengths), pages)
    return KvCache(k, v, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"))


def invariant_masks(cache):
    bounds = torch.randint(0, 3000, (*cache.k.shape[:3], 1), dtype=torch.int32, device="cuda")
    bounds[torch.rand(bounds.shape, device="cuda") < 0.6] = FOR_GOOD
    bounds[cache.page_table[0, 8:30].long()] = 0  # splits of which nothing is seen
    tail, depth = (x.cuda() for x in masks.draft_tree(torch.tensor([[-1, 0, 0]] * cache.batch)))
    words = torch.randint(-(2**31), 2**31, (cache.batch, 100, 4), device="cuda").int()
    depths = torch.randint(0, 50, (cache.batch, 100), device="cuda").int()
    return {
        "causal": SequenceMask(),
        "drafts": SequenceMask(tail=words, tail_depth=depths),
        "window": SequenceMask(window_size=(300, 0)),
        "narrow": SequenceMask(window_size=(1, 0)),
        "bounds": SequenceMask(bounds=bounds, key_layout="pages"),
        "tree": SequenceMask(tail=tail, tail_depth=depth, window_size=(500, 0)),
        "blocks": SequenceMask(block_mask=torch.rand(1, 2, 24, 24, device="cuda") < 0.5),
    }


def part(cache, mask, b):
    """Request b's."""
    own = KvCache(cache.k, cache.v, cache.page_table[b : b + 1], cache.seqlens[b : b + 1])
    tail, depth = (None if x is None else x[b : b + 1] for x in (mask.tail, mask.tail_depth))
    others = {name: getattr(mask, name) for name in ("bounds", "block_mask", "key_layout")}
    return own, SequenceMask(mask.causal, mask.window_size, tail=tail, tail_depth=depth, **others)


@pytest.mark.parametrize("name", ["causal", "drafts", "window", "narrow", "bounds", "tree", "blocks"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("rows", [3, 12, 40])
def test_a_request_has_its_bits_in_any_batch(name, dim, rows):
    cache = long_cache(dim)
    mask = invariant_masks(cache)[name]
    q = torch.randn(len(LENGTHS), rows, 8, dim, device="cuda").bfloat16()
    out, lse = run(q, cache, mask)
    want = flashmask_with_kvcache(q, cache, mask)
    torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
    assert same((out, lse), run(q, cache, mask, max_ctas=5))
    for b in range(len(LENGTHS)):
        own, own_mask = part(cache, mask, b)
        alone = run(q[b : b + 1], own, own_mask)
        assert same(alone, (out[b : b + 1], lse[b : b + 1])), b
        assert same(alone, run(q[b : b + 1], own, own_mask, max_ctas=1)), b


@pytest.mark.parametrize("name", ["causal", "window", "bounds", "blocks"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.skipif(not IS_HOPPER, reason="they promise L1 alone")
def test_rows_have_their_bits_in_chunks_of_any_size(name, dims, dtype):
    """L2: a row of a prefill is that of decode and of verification."""
    keys, rows = 1500, 300
    cache = long_cache(dims[0], (keys,), dim_v=dims[1])
    cache = KvCache(cache.k.to(dtype), cache.v.to(dtype), cache.page_table, cache.seqlens)
    mask = invariant_masks(cache)[name]
    q = torch.randn(1, rows, 8, dims[0], device="cuda").to(dtype)
    out, lse = run(q, cache, mask)
    torch.testing.assert_close(out, flashmask_with_kvcache(q, cache, mask), atol=2e-2, rtol=2e-2)
    for size in (1, 7, 64, 130):
        for begin in range(0, rows, size if size > 1 else 37):
            end = min(begin + size, rows)
            cache.seqlens.fill_(keys - rows + end)
            chunk = run(q[:, begin:end].contiguous(), cache, mask)
            assert same(chunk, (out[:, begin:end], lse[..., begin:end])), (begin, size)


def test_empty_requests_change_no_bit():
    cache = long_cache(128, (20000,))
    q = torch.randn(256, 1, 8, 128, device="cuda").bfloat16()
    wanted = run(q[77:78], cache)
    table = torch.zeros(256, cache.page_table.shape[1], dtype=torch.int32, device="cuda")
    seqlens = torch.zeros(256, dtype=torch.int32, device="cuda")
    table[77], seqlens[77] = cache.page_table[0], cache.seqlens[0]
    out, lse = run(q, KvCache(cache.k, cache.v, table, seqlens))
    assert same(wanted, (out[77:78], lse[77:78]))
    assert out.count_nonzero() == out[77].count_nonzero() and torch.isinf(lse[78:]).all()


def test_a_neighbour_that_grows_changes_no_bit():
    cache = long_cache(128, (700, 9, 20000))
    q = torch.randn(3, 1, 8, 128, device="cuda").bfloat16()
    before = run(q, cache)
    cache.seqlens[1] = 10
    after = run(q, cache)
    for b in (0, 2):
        assert same([x[b] for x in before], [x[b] for x in after])
    assert not torch.equal(before[0][1], after[0][1])


@pytest.mark.parametrize("dim", [64, 128])
def test_invariant_bits_do_not_depend_on_pages(dim):
    cache = long_cache(dim)
    q = torch.randn(4, 1, 8, dim, device="cuda").bfloat16()
    wanted = run(q, cache)
    k, v = (x[cache.page_table.long()].flatten(1, 2) for x in (cache.k, cache.v))
    length = k.shape[1]
    for size in (1, 4, 32, 94, length):
        pages = torch.randperm(4 * length // size, device="cuda")
        moved_k, moved_v = torch.empty_like(k).view(-1, size, 2, dim), torch.empty_like(v).view(-1, size, 2, dim)
        moved_k[pages], moved_v[pages] = k.view(-1, size, 2, dim), v.view(-1, size, 2, dim)
        assert same(wanted, run(q, KvCache(moved_k, moved_v, pages.int().view(4, -1), cache.seqlens))), size
    assert same(wanted, run(q, KvCache(k, v, seqlens=cache.seqlens)))
    ends = torch.arange(5, dtype=torch.int32, device="cuda") * cache.page_table.shape[1]
    lists = KvCache(cache.k, cache.v, (ends, cache.page_table.flatten()), cache.seqlens)
    assert same(wanted, run(q, lists))


@pytest.mark.parametrize("name", ["causal", "drafts", "bounds", "tree"])
def test_a_graph_has_the_bits_of_eager_calls_with_batch_invariant(name):
    cache = long_cache(128)
    mask = invariant_masks(cache)[name]
    q = torch.randn(4, 3, 8, 128, device="cuda").bfloat16()
    plan, out = CachePlan(9, 40, 3072, 8, 2, 128, device="cuda", **INVARIANT), torch.empty_like(q)
    plan.update(mask, cache, rows=3)
    flashmask_with_kvcache(q, cache, mask, plan, out=out, **INVARIANT)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update(mask, cache, rows=3)
        flashmask_with_kvcache(q, cache, mask, plan, out=out, **INVARIANT)
        flashmask_with_kvcache(q, cache, mask, plan, out=out, **INVARIANT)
    for _ in range(8):
        cache.seqlens.copy_(torch.randint(0, 3001, (4,)))
        q.normal_()
        graph.replay()
        assert torch.equal(out, run(q, cache, mask)[0])
        own, own_mask = part(cache, mask, 2)
        assert torch.equal(out[2:3], run(q[2:3], own, own_mask)[0])


def test_invariant_bits_of_packed_rows():
    cache = long_cache(128)
    ends = torch.tensor([0, 2, 2, 19, 20], dtype=torch.int32, device="cuda")
    q = torch.randn(20, 8, 128, device="cuda").bfloat16()
    out, lse = run(q, cache, cu_seqlens_q=ends)
    for b, (begin, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:])):
        own, _ = part(cache, SequenceMask(), b)
        alone = run(q[None, begin:end], own) if end > begin else None
        if alone:
            assert same((alone[0][0], alone[1][0]), (out[begin:end], lse[:, begin:end])), b


def test_splits_are_explained():
    cache = long_cache(64)
    q = torch.randn(4, 1, 8, 64, device="cuda").bfloat16()
    said = json.loads(explain(q, cache, **INVARIANT))
    assert re.match(r"tiles of up to \d+ packed rows; at multiples of 256 keys, whole splits in ", said["splits"])


def test_scratch_is_bounded_and_explained():
    q, k, v, table = draw()
    device_q, cache = on("cuda", q, k, v, table, torch.full((4,), 9, dtype=torch.int32))
    said = json.loads(explain(device_q, cache))
    assert CachePlan(4096, 4096, 8192, 32, 8, 128, device="cuda").bytes < (15e6 if IS_HOPPER else 25e6)
    if IS_HOPPER:
        # Without lists of many requests a plan is its partial results.
        for dim, most in ((64, 10e6), (128, 10e6), (256, 18e6)):
            assert CachePlan(1, 1, 8192, 32, 8, dim, device="cuda").bytes <= most
        assert said["kernel"] == "sm90.decode.bf16.d64.dv64.c1" and "boxes of 16 keys by TMA" in said["pages"]
    cache.k = padded(cache.k)
    assert "gathered key by key" in json.loads(explain(device_q, cache))["pages"]
