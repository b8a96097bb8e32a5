# SPDX-License-Identifier: Apache-2.0
"""Attention over KV caches against dense attention in float64, and what the functions refuse."""

import dataclasses
import math

import pytest
import torch
from devices import ON_CUDA, cpu_only
from flashmask import masks
from flashmask.errors import UnsupportedError
from flashmask.inference import (
    CachePlan,
    KvCache,
    SequenceMask,
    append_kv,
    explain,
    flash_attn_with_kvcache,
    flashmask_with_kvcache,
    scales_of,
)

pytestmark = cpu_only("in float32, and with bits that depend on no neighbour; test_cuda_caches.py has the GPU's")
FOR_GOOD = 2**31 - 1


@dataclasses.dataclass
class Batch:
    """Sequences as tensors of their own, and the last of their rows."""

    q: list  # [m, heads_q, d]
    k: list  # [n, heads_kv, d]
    v: list

    @property
    def keys(self):
        return [len(k) for k in self.k]

    def packed(self):
        ends = torch.tensor([0] + [len(q) for q in self.q]).cumsum(0)
        return torch.cat(self.q), ends.int()


def draw(keys, rows, heads_q=4, heads_kv=2, dim=32, dtype=torch.float32):
    return Batch(
        [torch.randn(m, heads_q, dim).to(dtype) for m in rows],
        [torch.randn(n, heads_kv, dim).to(dtype) for n in keys],
        [torch.randn(n, heads_kv, dim).to(dtype) for n in keys],
    )


def paged(batch, page_size, layout="NHD", lists=False, dtype=None):
    """The batch in pages in a random order; slots without keys are NaN."""
    needed = [-(-n // page_size) for n in batch.keys]
    order = torch.randperm(sum(needed) + 2).tolist()
    shape = (len(order), page_size, *batch.k[0].shape[1:])
    dtype = dtype or batch.k[0].dtype
    k, v = (torch.full(shape, float("nan")).to(dtype) for _ in range(2))
    table = torch.full((len(needed), max(needed) + 1), -1, dtype=torch.int32)
    for b, n in enumerate(needed):
        for x in range(n):
            page = table[b, x] = order.pop()
            for to, of in ((k, batch.k[b]), (v, batch.v[b])):
                part = of[x * page_size : (x + 1) * page_size]
                to[page, : len(part)] = part.to(dtype)
    if lists:
        ends = torch.tensor([0, *needed]).cumsum(0).int()
        table = ends, torch.cat([table[b, :n] for b, n in enumerate(needed)])
    if layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return KvCache(k, v, table, torch.tensor(batch.keys, dtype=torch.int32), layout=layout)


def dense(batch, visible, softcap=0.0, sink=None, bias=None):
    """[out of each request] in float64. visible(b, hk): bool [m, n]; bias(b, h): [m, n]."""
    outs = []
    for b, (q, k, v) in enumerate(zip(batch.q, batch.k, batch.v)):
        group, heads = q.shape[1] // k.shape[1], []
        for h in range(q.shape[1]):
            scores = q[:, h].double() @ k[:, h // group].double().T * q.shape[2] ** -0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if bias:
                scores = scores + bias(b, h)
            scores = scores.masked_fill(~visible(b, h // group), float("-inf"))
            if sink is not None:
                scores = torch.cat([scores, sink[h].double().expand(len(q), 1)], 1)
            weights = scores.softmax(1).nan_to_num(0.0)
            heads.append(weights[:, : len(k)] @ v[:, h // group].double())
        outs.append(torch.stack(heads, 1))
    return torch.cat(outs)


def band(batch, left=None, right=0):
    def visible(b, hk):
        n, m = batch.keys[b], len(batch.q[b])
        row, key = torch.arange(n - m, n)[:, None], torch.arange(n)
        seen = (row >= 0) & (key >= 0)
        if right is not None:
            seen = seen & (key <= row + right)
        return seen if left is None else seen & (key >= row - left)

    return visible


def check(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "page_size, layout, lists", [(1, "NHD", False), (3, "HND", True), (16, "HND", False), (64, "NHD", True)]
)
def test_pages(page_size, layout, lists):
    batch = draw([70, 5, 0, 33], [3, 9, 2, 1])
    q, ends = batch.packed()
    out = flashmask_with_kvcache(q, paged(batch, page_size, layout, lists), cu_seqlens_q=ends)
    check(out, dense(batch, band(batch)))


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float64, 1e-12)])
def test_dtypes(dtype, tolerance):
    batch = draw([40, 20], [2, 2], dtype=dtype)
    backend = "reference" if dtype == torch.float64 else "auto"
    out, lse = flashmask_with_kvcache(torch.stack(batch.q), paged(batch, 16), backend=backend, return_softmax_lse=True)
    assert out.dtype == dtype and lse.shape == (2, 4, 2)
    check(out.flatten(0, 1), dense(batch, band(batch)), tolerance)


def test_window_softcap_sink_and_alibi():
    batch = draw([70, 33], [3, 5])
    q, ends = batch.packed()
    sink, slopes = torch.randn(4), torch.rand(4)

    def bias(b, h):
        n, m = batch.keys[b], len(batch.q[b])
        return -slopes[h].double() * (torch.arange(n - m, n)[:, None] - torch.arange(n)).abs()

    out = flashmask_with_kvcache(
        q,
        paged(batch, 16),
        SequenceMask(window_size=(20, 0)),
        cu_seqlens_q=ends,
        softcap=5.0,
        sink=sink,
        alibi_slopes=slopes,
    )
    check(out, dense(batch, band(batch, 20), 5.0, sink, bias))


@pytest.mark.parametrize("in_pages", [True, False])
def test_bounds_lie_by_sequences_or_beside_the_pages(in_pages):
    batch = draw([70, 33], [3, 5])
    q, ends = batch.packed()
    cache = paged(batch, 16)
    hidden_from = torch.randint(0, 90, (2, 2, 70), dtype=torch.int32)  # [batch, heads_kv, key]
    hidden_from[:, :, ::3] = FOR_GOOD
    bounds = hidden_from[..., None]
    if in_pages:
        bounds = torch.zeros(len(cache.k), 16, 2, 1, dtype=torch.int32)
        for b in range(2):
            for j in range(batch.keys[b]):
                bounds[cache.page_table[b, j // 16], j % 16, :, 0] = hidden_from[b, :, j]

    def visible(b, hk):
        n, m = batch.keys[b], len(batch.q[b])
        return band(batch)(b, hk) & (torch.arange(n - m, n)[:, None] < hidden_from[b, hk, :n])

    mask = SequenceMask(bounds=bounds)
    check(flashmask_with_kvcache(q, cache, mask, cu_seqlens_q=ends), dense(batch, visible))


def test_a_shape_that_fits_both_layouts_is_refused():
    batch = draw([2, 2], [1, 1])
    cache = KvCache(torch.stack(batch.k), torch.stack(batch.v), torch.tensor([[0], [1]], dtype=torch.int32))
    bounds = torch.full((2, 2, 2, 1), FOR_GOOD, dtype=torch.int32)
    with pytest.raises(ValueError, match="key_layout is 'auto'.*fits both"):
        flashmask_with_kvcache(torch.stack(batch.q), cache, SequenceMask(bounds=bounds))
    for key_layout in ("pages", "sequences"):
        out = flashmask_with_kvcache(torch.stack(batch.q), cache, SequenceMask(bounds=bounds, key_layout=key_layout))
        check(out.flatten(0, 1), dense(batch, band(batch)))


def ancestors(parents):
    """[T, T] by walking up."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for t in range(len(parents)):
        up = parents[t]
        while up >= 0:
            seen[t, up] = True
            up = parents[up]
    return seen


@pytest.mark.parametrize("window", [-1, 12])
def test_a_tree_of_drafts(window):
    drafts = 40
    trees = [[int(torch.randint(-1, t, ())) if t else -1 for t in range(drafts)] for _ in range(2)]
    tail, depth = masks.draft_tree(torch.tensor(trees))
    batch = draw([70, 52], [drafts, drafts])

    def visible(b, hk):
        n = batch.keys[b]
        base, seen = n - drafts, ancestors(trees[b])
        assert depth[b].tolist() == (seen.sum(1) - 1).tolist()
        row = base + depth[b][:, None]
        key = torch.cat([torch.arange(base), base + depth[b]])
        see = torch.cat([torch.ones(drafts, base, dtype=torch.bool), seen], 1)
        return see if window < 0 else see & (key >= row - window)

    mask = SequenceMask(window_size=(window, -1), tail=tail, tail_depth=depth)
    out = flashmask_with_kvcache(torch.stack(batch.q), paged(batch, 16), mask)
    check(out.flatten(0, 1), dense(batch, visible))
    if window < 0:  # only a window measures by depth
        by_bits = flashmask_with_kvcache(torch.stack(batch.q), paged(batch, 16), mask.replace(tail_depth=None))
        check(by_bits.flatten(0, 1), dense(batch, visible))
    short = mask.replace(tail_lens=torch.zeros(2, dtype=torch.int32), tail_depth=None)
    causal = flashmask_with_kvcache(torch.stack(batch.q), paged(batch, 16), short)
    check(causal.flatten(0, 1), dense(batch, band(batch, None if window < 0 else window)))


def test_draft_trees_are_checked():
    assert masks.draft_tree([-1, 0, 0])[1].tolist() == [[0, 1, 1]]
    assert masks.tail_from_dense(torch.ones(33, 33)).tolist()[0][0] == [-1, 1]
    assert masks.draft_tree(torch.zeros(2, 0, dtype=torch.int64))[0].shape == (2, 0, 0)
    with pytest.raises(ValueError, match="parents has shape.*at most 128"):
        masks.draft_tree(torch.zeros(129, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"visible has shape \[1, 3, 4\]"):
        masks.tail_from_dense(torch.ones(3, 4))
    with pytest.raises(TypeError, match="parents is torch.float32"):
        masks.draft_tree(torch.zeros(3))


def test_float8_with_scales():
    batch = draw([40, 20], [2, 2])
    batch.k, batch.v = ([x.to(torch.float8_e4m3fn).float() for x in of] for of in (batch.k, batch.v))
    cache = paged(batch, 16, dtype=torch.float8_e4m3fn)
    k_scale, v_scale = torch.tensor([0.5, 2.0]), 3.0
    q = torch.stack(batch.q)
    scaled = Batch(batch.q, [k * k_scale[:, None] for k in batch.k], [v * v_scale for v in batch.v])
    for k, v in ((cache.k, cache.v), (cache.k.view(torch.uint8), cache.v.view(torch.uint8))):
        out = flashmask_with_kvcache(q, KvCache(k, v, cache.page_table, cache.seqlens, k_scale, v_scale))
        check(out.flatten(0, 1), dense(scaled, band(scaled)))
    with pytest.raises(UnsupportedError, match="float8_e5m2.*float8_e4m3fn"):
        KvCache(cache.k.to(torch.float8_e5m2), cache.v)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_appending_writes_scales(heads, dtype):
    """Tokens come with scales of their own: their largest number becomes 448."""
    pages = torch.zeros(2, 3, 16, 2, 32, dtype=torch.float8_e4m3fn)
    scales = torch.full((2, 3, 16, heads), -1.0)
    cache = KvCache(*pages, torch.tensor([[2, 0]]).int(), torch.tensor([20]).int(), *scales)
    k, v = (torch.randn(1, 20, 2, 32).mul(torch.logspace(-4, 3, 20).view(1, 20, 1, 1)).to(dtype) for _ in range(2))
    k[0, 3] = 0
    k[0, 5, 0, 7] = math.nan
    append_kv(k, v, cache, write_scales=True)
    written = torch.cat([torch.tensor([2]).repeat(16), torch.tensor([0]).repeat(4)]), torch.arange(20) % 16
    for x, stored, scale in zip((k, v), pages, scales):
        largest = x[0].float().abs().nan_to_num(0).amax(-1)
        largest = largest.amax(-1, keepdim=True) if heads == 1 else largest
        want = torch.where(largest > 0, largest / 448, 1)
        torch.testing.assert_close(scale[written], want, rtol=1e-7, atol=0)
        number = stored[written].float() * want[..., None]
        torch.testing.assert_close(number, x[0].float(), rtol=2**-4, atol=2e-5, equal_nan=True)
        assert (stored[written].float().abs().nan_to_num(0).amax((-1, -2)) == 448)[[0, 1, 2, *range(6, 20)]].all()
    assert (scales[:, 1] == -1).all() and (scales[:, 0, 4:] == -1).all()
    plain = KvCache(cache.k, cache.v, cache.page_table, cache.seqlens, 1.0, scales[1])
    with pytest.raises(ValueError, match="k_scale is shared by pages.*scales_of.*float32 .3, 1 or 16, 1 or 2."):
        append_kv(k, v, plain, write_scales=True)
    plain = KvCache(cache.k, cache.v, cache.page_table, cache.seqlens, scales[0])
    with pytest.raises(ValueError, match="write_scales is set and v_scale is absent"):
        append_kv(k, v, plain, write_scales=True)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_appending_writes_scales_of_pages(heads, dtype):
    """A page's scale is the least power of two that takes its tokens, in one call or in many."""
    k, v = (torch.randn(1, 40, 2, 32).mul(torch.logspace(-3, 2, 40).view(1, 40, 1, 1)).to(dtype) for _ in range(2))
    table, whole = torch.tensor([2, 0, 1]), None
    for step in (40, 9, 1):
        pages, scales = torch.zeros(2, 3, 16, 2, 32).to(torch.float8_e4m3fn), torch.full((2, 3, 1, heads), math.nan)
        cache = KvCache(*pages, table.int()[None], torch.zeros(1).int(), *scales)
        for rows in torch.arange(40).split(step):
            cache.seqlens += len(rows)
            append_kv(k[:, rows], v[:, rows], cache, write_scales=True)
        for x, stored, scale in zip((k, v), pages, scales):
            tokens = torch.nn.functional.pad(x[0].double(), (0, 0, 0, 0, 0, 8)).view(3, 16, 2, 32)
            largest = tokens.abs().amax((1, 2, 3) if heads == 1 else (1, 3)).view(3, 1, heads)
            assert torch.equal(scale[table], (largest / 448).log2().ceil().exp2().float())
            number = (stored[table].float() * scale[table, ..., None]).flatten(0, 1)[:40]
            error = (number - x[0].float()).abs()
            unit = scale[table].expand(3, 16, 2).flatten(0, 1)[:40, :, None] * 2**-9  # of e4m3's least numbers
            assert (error <= torch.maximum(x[0].float().abs() / 16, unit)).all()
        out = flashmask_with_kvcache(torch.ones(1, 40, 4, 32), cache)
        whole = out if whole is None else whole
        torch.testing.assert_close(out, whole, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("per", ["tensor", "head"])
def test_scales_of_a_calibration(per):
    """Numbers of the calibration are stored without saturation; what is not finite does not count."""
    k, v = torch.randn(2, 9, 2, 32) * torch.tensor([30.0, 0.1]).view(2, 1), torch.zeros(7, 2, 16, dtype=torch.bfloat16)
    k[0, 0, 0, :2] = torch.tensor([math.nan, -math.inf])
    k_scale, v_scale = scales_of(k, v, per)
    largest = k.abs().nan_to_num(0, posinf=0).amax((0, 1, 3) if per == "head" else (0, 1, 2, 3))
    torch.testing.assert_close(k_scale * 448, largest, rtol=1e-6, atol=0)
    assert k_scale.dtype == torch.float32 and v_scale.dtype == torch.float32 and (v_scale == 1).all()
    pages = torch.zeros(2, 2, 16, 2, 32).to(torch.float8_e4m3fn)
    cache = KvCache(*pages, seqlens=torch.tensor([9, 9]).int(), k_scale=k_scale)
    append_kv(k, k, cache)
    number = pages[0, :, :9].float() * k_scale.view(-1, 1)
    kept = k.isfinite()
    torch.testing.assert_close(number[kept], k[kept], rtol=2**-4, atol=largest.max().item() * 2**-18)
    assert scales_of(k[:0], v)[0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="per is 'page'; it must be 'tensor' or 'head'"):
        scales_of(k, v, "page")
    with pytest.raises(ValueError, match="v is .*it must be floating-point"):
        scales_of(k, v.int())


def test_appending_is_what_was_there():
    """Token by token, in chunks and by slots; a chunk's rows see what those of one prefill do."""
    batch = draw([37, 21], [37, 21])
    whole = paged(batch, 16)
    q, ends = batch.packed()
    want = flashmask_with_kvcache(q, whole, cu_seqlens_q=ends)
    check(want, dense(batch, band(batch)))
    cache = KvCache(torch.empty_like(whole.k), torch.empty_like(whole.v), whole.page_table, torch.zeros(2).int())
    done, outs = [0, 0], ([], [])
    for step in (1, 7, 16, 13):
        rows = [min(step, len(x) - at) for x, at in zip(batch.q, done)]
        chunk_ends = torch.tensor([0, *rows]).cumsum(0).int()

        def part(xs):
            return torch.cat([x[at : at + m] for x, at, m in zip(xs, done, rows)])

        cache.seqlens += torch.tensor(rows).int()
        append_kv(part(batch.k), part(batch.v), cache, cu_seqlens=chunk_ends)
        out = flashmask_with_kvcache(part(batch.q), cache, cu_seqlens_q=chunk_ends)
        for of, rows_of in zip(outs, out.split(rows)):
            of.append(rows_of)
        done = [at + m for at, m in zip(done, rows)]
    assert torch.equal(torch.cat([*outs[0], *outs[1]]), want)
    by_slots = KvCache(torch.empty_like(whole.k), torch.empty_like(whole.v), whole.page_table, whole.seqlens)
    slots = torch.cat(
        [whole.page_table[b, torch.arange(n) // 16] * 16 + torch.arange(n) % 16 for b, n in enumerate(batch.keys)]
    )
    append_kv(torch.cat(batch.k), torch.cat(batch.v), by_slots, slots=slots)
    assert torch.equal(flashmask_with_kvcache(q, by_slots, cu_seqlens_q=ends), want)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("chunk", [1, 64, 100])
def test_a_training_mask_serves_every_chunk(chunk, blocks):
    n, mask = 100, masks.causal_document(seqlens=[30, 45, 25])
    if blocks:
        n, chunk = 300, 3 * chunk
        kept = torch.tensor([[[1, 0, 0], [0, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 0, 0], [0, 1, 0]]], dtype=torch.bool)
        mask = masks.causal(n).replace(block_mask=kept[None])
    q, k, v = (torch.randn(1, n, 2, 32) for _ in range(3))
    from flashmask import flashmask_attention

    want = flashmask_attention(q, k, v, mask)
    sequence_mask = SequenceMask.from_mask(mask)
    for begin in range(0, n, chunk):
        end = min(begin + chunk, n)
        out = flashmask_with_kvcache(q[:, begin:end], KvCache(k[:, :end], v[:, :end]), sequence_mask)
        torch.testing.assert_close(out, want[:, begin:end], atol=1e-5, rtol=1e-5)


def test_a_training_mask_goes_on_past_its_end():
    mask = SequenceMask.from_mask(masks.causal_document(seqlens=[3, 5]))
    assert mask.bounds.flatten().tolist() == [3, 3, 3] + [FOR_GOOD] * 5
    with pytest.raises(UnsupportedError, match="a q_offset"):
        SequenceMask.from_mask(masks.causal(8).replace(q_offset=1))
    with pytest.raises(ValueError, match="must be square"):
        SequenceMask.from_mask(masks.causal(8).replace(seqlen_k=9))


def test_bounds_are_appended_with_their_keys():
    cache = KvCache(
        torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8), torch.tensor([[2, 0]]).int(), torch.tensor([5]).int()
    )
    mask = SequenceMask(bounds=torch.zeros(3, 4, 1, 1, dtype=torch.int32))
    rows = torch.ones(1, 2, 1, 8)
    append_kv(rows, rows, cache, bounds=torch.tensor([7, 8]).int().view(1, 2, 1, 1), mask=mask)
    assert mask.bounds[2, 3].item() == 7 and mask.bounds[0, 0].item() == 8 and mask.bounds.count_nonzero() == 2
    with pytest.raises(ValueError, match="bounds is given and mask has none"):
        append_kv(rows, rows, cache, bounds=mask.bounds)


def test_a_plan_serves_the_calls_that_it_was_updated_for():
    batch = draw([40, 20], [2, 2])
    cache, q, mask = paged(batch, 16), torch.stack(batch.q), SequenceMask(window_size=(9, 0))
    plan = CachePlan(4, 16, 64, 4, 2, 32)
    assert plan.bytes > 0
    with pytest.raises(ValueError, match="never built"):
        flashmask_with_kvcache(q, cache, mask, plan)
    plan.update(mask, cache)
    for layer in range(2):
        of_layer = KvCache(cache.k.clone() + layer, cache.v.clone(), cache.page_table, cache.seqlens)
        got = flashmask_with_kvcache(q, of_layer, mask, plan)
        assert torch.equal(got, flashmask_with_kvcache(q, of_layer, mask))
    with pytest.raises(ValueError, match="window_size.*plan.update"):
        flashmask_with_kvcache(q, cache, None, plan)
    with pytest.raises(ValueError, match="seqlens is another"):
        flashmask_with_kvcache(q, KvCache(cache.k, cache.v, cache.page_table, cache.seqlens.clone()), mask, plan)
    with pytest.raises(ValueError, match="max_batch 1"):
        CachePlan(1, 16, 64, 4, 2, 32).update(mask, cache)


def test_attributes_that_are_set_are_those_of_the_next_call():
    batch, other = draw([40, 20], [2, 2]), draw([40, 20], [2, 2])
    q, cache, second = torch.stack(batch.q), paged(batch, 16), paged(other, 16, lists=True)
    before = flashmask_with_kvcache(q, cache)
    cache.seqlens = cache.seqlens - 3
    assert torch.equal(
        flashmask_with_kvcache(q, cache),
        flashmask_with_kvcache(q, KvCache(cache.k, cache.v, cache.page_table, cache.seqlens)),
    )
    for name in ("k", "v", "page_table", "seqlens"):
        setattr(cache, name, getattr(second, name))
    assert cache.batch == 2
    got = flashmask_with_kvcache(q, cache)
    assert torch.equal(got, flashmask_with_kvcache(q, second)) and not torch.equal(got, before)
    pair = list(second.page_table)
    cache.page_table = pair
    flashmask_with_kvcache(q, cache)
    pair[1] = None
    assert torch.equal(flashmask_with_kvcache(q, cache), got)


def test_a_scale_may_be_set_to_a_number():
    batch = draw([8], [1])
    cache, q = paged(batch, 16, dtype=torch.float8_e4m3fn), torch.stack(batch.q)
    cache.v_scale = 0.5
    want = flashmask_with_kvcache(q, KvCache(cache.k, cache.v, cache.page_table, cache.seqlens)) * 0.5
    assert torch.equal(flashmask_with_kvcache(q, cache), want) and cache.v_scale.item() == 0.5


def test_results_go_where_they_are_wanted():
    batch = draw([40, 20], [2, 2])
    q, cache = torch.stack(batch.q), paged(batch, 16)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 2)
    got = flashmask_with_kvcache(q, cache, out=out, lse=lse, return_softmax_lse=True)
    assert got[0] is out and got[1] is lse and out.isfinite().all() and lse.isfinite().all()


def test_gradients_are_refused():
    batch = draw([8], [1])
    q, cache = torch.stack(batch.q).requires_grad_(), paged(batch, 16)
    with pytest.raises(RuntimeError, match="q requires a gradient.*torch.no_grad"):
        flashmask_with_kvcache(q, cache)
    with torch.no_grad():
        flashmask_with_kvcache(q, cache)


def test_validate_names_the_request():
    batch = draw([40, 20], [2, 2])
    cache, q = paged(batch, 16), torch.stack(batch.q)
    cache.validate()
    cache.page_table[1, 0] = 99
    with pytest.raises(ValueError, match="page_table has page 99.*request 1"):
        cache.validate()
    with pytest.raises(ValueError, match="page_table has page 99"):
        flashmask_with_kvcache(q, cache, validate=True)
    flashmask_with_kvcache(q, cache)


@pytest.mark.parametrize("name", ["rotary_cos", "cache_leftpad", "dropout_p", "attn_mask", "k"])
def test_arguments_of_other_libraries_are_refused_by_name(name):
    batch = draw([8], [1])
    with pytest.raises(UnsupportedError, match=f"{name} is given.*not an argument here"):
        flashmask_with_kvcache(torch.stack(batch.q), paged(batch, 16), **{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        flashmask_with_kvcache(torch.stack(batch.q), paged(batch, 16), nonsense=1)


def test_refusals_come_from_the_library_with_their_type():
    batch = draw([8], [1])
    q, cache = torch.stack(batch.q), paged(batch, 16)
    with pytest.raises(ValueError, match=r"q has shape.*\[rows, heads_q, head_dim\]"):
        flashmask_with_kvcache(q, cache, cu_seqlens_q=torch.zeros(2).int())
    with pytest.raises(ValueError, match="cache.k is torch.float32|cache.k is float32.*bfloat16 as the rows"):
        flashmask_with_kvcache(q.bfloat16(), cache)
    with pytest.raises(ValueError, match="split_size is 100"):
        flashmask_with_kvcache(q, cache, split_size=100)
    with pytest.raises(ValueError, match="layout is 'DHN'"):
        KvCache(cache.k, cache.v, layout="DHN")


def test_flash_attns_function():
    batch = draw([37, 21], [2, 2])
    q, whole = torch.stack(batch.q), paged(batch, 16)
    want = flashmask_with_kvcache(q, whole)
    k, v = whole.k.clone(), whole.v.clone()
    new = [torch.stack([x[-2:] for x in of]) for of in (batch.k, batch.v)]
    before = whole.seqlens - 2
    out, lse = flash_attn_with_kvcache(
        q, k, v, *new, cache_seqlens=before, block_table=whole.page_table, causal=True, return_softmax_lse=True
    )
    assert torch.equal(out, want) and lse.shape == (2, 4, 2)
    entries = torch.zeros(3, 40, 2, 32), torch.zeros(3, 40, 2, 32)
    for to, of in zip(entries, (batch.k, batch.v)):
        for b, entry in enumerate((2, 0)):
            to[entry, : len(of[b])] = of[b]
    which = torch.tensor([2, 0]).int()
    out = flash_attn_with_kvcache(q, *entries, cache_seqlens=whole.seqlens, cache_batch_idx=which, causal=True)
    assert torch.equal(out, want)
    with pytest.raises(UnsupportedError, match="rotary_cos.*rotate"):
        flash_attn_with_kvcache(q, k, v, rotary_cos=q)


@pytest.mark.parametrize("has_bounds", [False, True])
def test_no_graph_breaks(has_bounds):
    batch = draw([40, 20], [2, 2])
    cache, q = paged(batch, 16), torch.stack(batch.q)
    bounds = torch.full((len(cache.k), 16, 1, 1), FOR_GOOD, dtype=torch.int32) if has_bounds else None
    mask = SequenceMask(window_size=(9, 0), bounds=bounds)
    rows = torch.randn(2, 2, 2, 32)

    def step(q, k, v, table, seqlens, rows):
        cache = KvCache(k, v, table, seqlens)
        append_kv(rows, rows, cache)
        return flashmask_with_kvcache(q * 2, cache, mask) + 1

    want_cache = cache.k.clone(), cache.v.clone()
    with torch.no_grad():
        want = step(q, *want_cache, cache.page_table, cache.seqlens, rows)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        got_cache = cache.k.clone(), cache.v.clone()
        got = compiled(q, *got_cache, cache.page_table, cache.seqlens, rows)
    assert torch.equal(got, want)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(got_cache, want_cache))


def test_opcheck():
    batch = draw([40, 20], [2, 2])
    cache, q = paged(batch, 16), torch.stack(batch.q)
    operands = cache.k.nan_to_num(), cache.v.nan_to_num(), *cache.operands()[2:]
    mask = SequenceMask().operands(cache, 2)
    out = torch.empty_like(q)
    tests = ("test_schema", "test_faketensor")
    arguments = (out, None, q, *operands, None, *mask, None, 0.0, None, None, False, 1024, None, None, "auto", 0)
    torch.library.opcheck(torch.ops.flashmask.cached_forward, arguments, test_utils=tests)
    rows = torch.randn(2, 1, 2, 32)
    arguments = (rows, rows, *operands, None, None, None, None, True, False, False)
    torch.library.opcheck(torch.ops.flashmask.append_kv, arguments, test_utils=tests)


def test_explain():
    batch = draw([40, 20], [2, 2])
    text = explain(torch.stack(batch.q), paged(batch, 16))
    assert '"backend": "cpu"' in text and "16 keys" in text and f'"bytes_read": {60 * 2 * 64 * 4}' in text


def test_a_small_measurement():
    from benchmarks.measure import cpu_cache

    row = cpu_cache.measure(torch.float32, 2, 64, 1)
    assert row["ours_ms"] > 0 and row["share_of_read"] > 0


def test_nothing_reads_unused_slots():
    assert not ON_CUDA
    batch = draw([40, 20], [2, 2])
    assert flashmask_with_kvcache(torch.stack(batch.q), paged(batch, 64)).isfinite().all()
