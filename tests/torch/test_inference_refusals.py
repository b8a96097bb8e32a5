# SPDX-License-Identifier: Apache-2.0
"""Calls over KV caches that are refused before anything is written, and what torch learns of their writes."""

import pytest
import torch
from devices import cpu_only
from flashmask import masks
from flashmask.errors import UnsupportedError
from flashmask.inference import CachePlan, KvCache, SequenceMask, append_kv, explain, flash_attn_with_kvcache
from flashmask.inference import flashmask_with_kvcache as attend

pytestmark = cpu_only("test_cuda_caches.py has the GPU's")


@pytest.fixture
def q():
    return torch.randn(2, 2, 4, 32)


@pytest.fixture
def rows():
    return torch.randn(2, 2, 2, 32)


@pytest.fixture
def cache():
    table = torch.tensor([[0, 2, 4], [1, 3, 5]]).int()
    return KvCache(torch.randn(6, 16, 2, 32), torch.randn(6, 16, 2, 32), table, torch.tensor([30, 20]).int())


def flash_attn(q, cache, *new, **arguments):
    """The call with flash-attn's names, of which it refuses one; the cache stays as it is."""
    before = cache.k.clone(), cache.v.clone()
    try:
        flash_attn_with_kvcache(q, cache.k, cache.v, *new, block_table=cache.page_table, **arguments)
    finally:
        assert torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1])


@pytest.mark.parametrize(
    "name, way",
    [
        ("k_descale", "k_scale"),
        ("v_descale", "v_scale"),
        ("q_descale", "softmax_scale"),
        ("cu_seqlens_k_new", "append_kv"),
        ("attention_chunk", "bounds"),
        ("rotary_seqlens", "rotate"),
        ("cache_leftpad", "padding"),
        ("qv", "head_dim"),
    ],
)
def test_flash_attns_other_arguments_are_refused_by_name(q, cache, name, way):
    with pytest.raises(UnsupportedError, match=f"{name} is given.*{way}"):
        flash_attn(q, cache, cache_seqlens=cache.seqlens, **{name: torch.ones(2)})
    for nothing in (None, 0):
        flash_attn(q, cache, cache_seqlens=cache.seqlens, **{name: nothing})


def test_new_keys_need_a_place_and_values(q, cache, rows):
    with pytest.raises(ValueError, match="cache_seqlens is None beside k and v"):
        flash_attn(q, cache, rows, rows)
    with pytest.raises(ValueError, match="k is given and v is not"):
        flash_attn(q, cache, rows, None, cache_seqlens=cache.seqlens)
    with pytest.raises(ValueError, match="v is given and k is not"):
        flash_attn(q, cache, None, rows, cache_seqlens=cache.seqlens)


def test_gradients_are_refused_before_new_keys_are_written(q, cache, rows):
    with pytest.raises(RuntimeError, match="q requires a gradient"):
        flash_attn(q.requires_grad_(), cache, rows, rows, cache_seqlens=cache.seqlens - 2)


def test_gradients_of_a_cache_and_its_scales_are_refused(q, cache, rows):
    keys = KvCache(cache.k.clone().requires_grad_(), cache.v, cache.page_table, cache.seqlens)
    float8 = (x.to(torch.float8_e4m3fn) for x in (cache.k, cache.v))
    scaled = KvCache(*float8, cache.page_table, cache.seqlens, v_scale=torch.ones(2, requires_grad=True))
    for other, name in ((keys, "cache.k"), (scaled, "v_scale")):
        with pytest.raises(RuntimeError, match=f"{name} requires a gradient"):
            attend(q, other)
        with pytest.raises(RuntimeError, match=f"{name} requires a gradient"):
            append_kv(rows, rows, other)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"cache": 3}, "cache is a int; it must be a KvCache"),
        ({"mask": masks.causal(8)}, "mask is a Mask; it must be a SequenceMask; SequenceMask.from_mask"),
        ({"plan": 3}, "plan is a int; it must be a CachePlan"),
        ({"cu_seqlens_q": [0, 2]}, "cu_seqlens_q is .*list.*torch.Tensor"),
        ({"out": 3}, "out is 3"),
        ({"sink": [1.0]}, "sink is .*list"),
    ],
)
def test_arguments_of_another_kind_are_named(q, cache, changes, words):
    with pytest.raises(TypeError, match=words):
        attend(**{"q": q, "cache": cache, **changes})


@pytest.mark.parametrize(
    "name, wrong, words",
    [
        ("k", 3, "k is 3 .int.; it must be a torch.Tensor .pages, page_size, heads_kv, dim"),
        ("v", torch.zeros(6, 16, 2), "v has shape .*4 dimensions"),
        ("v", torch.zeros(6, 16, 2, 32).to(torch.float8_e5m2), "v is torch.float8_e5m2"),
        ("page_table", (torch.zeros(3).int(),), "page_table has 1 entries"),
        ("page_table", [[0, 2, 4], torch.zeros(3).int()], "page_indptr is .*list"),
        ("seqlens", [30, 20], "seqlens is .*list"),
        ("seqlens", torch.ones(2, dtype=torch.int32, device="meta"), "seqlens is on meta and k on cpu"),
        ("k_scale", "1", "k_scale is '1'"),
        ("layout", "HND", "layout is 'HND'; it must be 'NHD'"),
    ],
)
def test_an_attribute_that_is_set_is_checked_by_the_next_use(q, cache, rows, name, wrong, words):
    plan = CachePlan(2, 4, 48, 4, 2, 32)
    want, before = attend(q, cache), getattr(cache, name)
    setattr(cache, name, wrong)
    for use in (
        lambda: attend(q, cache),
        lambda: append_kv(rows, rows, cache),
        lambda: plan.update(None, cache),
        lambda: explain(q, cache),
        cache.validate,
    ):
        with pytest.raises((TypeError, ValueError, UnsupportedError), match=words):
            use()
    setattr(cache, name, before)
    assert torch.equal(attend(q, cache), want)


def test_a_plan_says_which_caches_it_is_for(q, cache):
    small = KvCache(*(x.to(torch.float8_e4m3fn) for x in (cache.k, cache.v)), cache.page_table, cache.seqlens)
    wide_plan, plan = (CachePlan(2, 4, 48, 4, 2, 32, float8=float8) for float8 in (False, True))
    with pytest.raises(ValueError, match="the cache is float8_e4m3 and the plan is for one of 16 or 32 bits"):
        wide_plan.update(None, small)
    with pytest.raises(ValueError, match="the cache is float32 and the plan is for one of float8_e4m3"):
        plan.update(None, cache)
    plan.update(None, small)
    assert torch.equal(attend(q, small, plan=plan), attend(q, small))


def test_other_functions_name_arguments_of_another_kind(q, cache, rows):
    plan = CachePlan(2, 4, 48, 4, 2, 32)
    for call in (
        lambda: append_kv(rows, rows, cache.k),
        lambda: explain(q, cache.k),
        lambda: plan.update(None, cache.k),
    ):
        with pytest.raises(TypeError, match="cache is a Tensor; it must be a KvCache"):
            call()
    with pytest.raises(TypeError, match="slots is .*list"):
        append_kv(rows, rows, cache, slots=[0, 1])
    with pytest.raises(TypeError, match="mask is a int; it must be a Mask"):
        SequenceMask.from_mask(3)
    with pytest.raises(ValueError, match="rows is -1"):
        plan.update(None, cache, rows=-1)


def test_a_backward_finds_out_that_a_saved_tensor_was_written(q, cache, rows):
    weight = torch.ones((), requires_grad=True)
    product = (weight * cache.k).sum()
    append_kv(rows, rows, cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    out = torch.empty_like(q)
    product = (weight * out).sum()
    attend(q, cache, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_inference_mode(cache, rows):
    with torch.inference_mode():
        q, own = torch.randn(2, 2, 4, 32), KvCache(cache.k.clone(), cache.v.clone(), cache.page_table, cache.seqlens)
        append_kv(rows, rows, own)
        attend(q, own, out=torch.empty_like(q))


def test_opcheck_in_full(q, cache, rows):
    ops, mask = torch.ops.flashmask, SequenceMask().operands(cache, 2)
    plan = CachePlan(2, 4, 48, 4, 2, 32)
    options = (None, 0.0, None, None, False, 1024, None, None, "auto", 0)
    lse = torch.empty(2, 4, 2)
    torch.library.opcheck(ops.cached_forward, (torch.empty_like(q), lse, q, *cache.operands(), None, *mask, *options))
    torch.library.opcheck(
        ops.cached_plan_build, (plan.buffer, plan.state, *cache.operands(), None, *mask, False, 1024, 2)
    )
    torch.library.opcheck(ops.append_kv, (rows, rows, *cache.operands(), None, None, None, None, True, False, False))


def test_compiled_code_updates_a_plan_and_calls_with_it(q, cache):
    plan = CachePlan(2, 4, 48, 4, 2, 32)

    def step(q, k, v, table, seqlens):
        cache = KvCache(k, v, table, seqlens)
        plan.update(None, cache)
        return attend(q, cache, None, plan, return_softmax_lse=True)

    arguments = q, cache.k, cache.v, cache.page_table, cache.seqlens
    for got, want in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments), step(*arguments)):
        assert torch.equal(got, want)


def test_compiled_code_takes_a_cache_and_a_plan_from_outside(q, cache, rows):
    plan, mask = CachePlan(2, 4, 48, 4, 2, 32), SequenceMask(window_size=(9, 0))

    def step(q, rows, seqlens):
        cache.seqlens = seqlens
        append_kv(rows, rows, cache)
        plan.update(mask, cache, rows=2)
        return attend(q, cache, mask, plan)

    lengths = torch.tensor([29, 17]).int()
    with torch.no_grad():
        want = step(q, rows, lengths)
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, rows, lengths)
        assert torch.equal(got, want) and cache.seqlens is lengths and torch.equal(attend(q, cache, mask), want)
