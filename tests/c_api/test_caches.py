# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache through the C structs alone: a right call, and what each struct refuses."""

import ctypes as C

import numpy as np
import pytest
from flashmask import capi
from flashmask._core import capi as core

lib = capi.load()
BATCH, ROWS, HEADS_Q, HEADS_KV, DIM, PAGE_SIZE, KEYS = 2, 2, 4, 2, 8, 4, 7


class Call:
    """fm_cached_args of two requests with seven keys in pages, and the arrays that it points to."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.q = rng.standard_normal((BATCH, ROWS, HEADS_Q, DIM)).astype(np.float32)
        self.k, self.v = (rng.standard_normal((5, PAGE_SIZE, HEADS_KV, DIM)).astype(np.float32) for _ in "kv")
        self.table = np.array([[3, 0], [1, 4]], np.int32)
        self.seqlens = np.full(BATCH, KEYS, np.int32)
        self.out = np.full_like(self.q, np.nan)
        self.lse = np.full((BATCH, HEADS_Q, ROWS), np.nan, np.float32)
        self.cache = capi.make(capi.KvCache, k=self.k, v=self.v, page_table=self.table, seqlens=self.seqlens)
        self.mask = capi.make(capi.SequenceMask, flags=capi.CAUSAL)
        self.args = capi.make(capi.CachedArgs, q=self.q, out=self.out, lse=self.lse, cache=C.pointer(self.cache))

    def bytes(self, options=None):
        """(status, bytes) of the workspace."""
        size = C.c_size_t()
        return lib.fm_cached_forward_workspace(C.byref(self.args), reference(options), C.byref(size)), size.value

    def run(self, options=None, less=0):
        status, size = self.bytes(options)
        if status != capi.OK:
            return status
        workspace = np.full(size, 255, np.uint8)
        return lib.fm_cached_forward(C.byref(self.args), workspace.ctypes.data, size - less, reference(options))


def reference(struct):
    return None if struct is None else C.byref(struct)


def refused(status, wanted, words):
    message = lib.fm_last_error().decode()
    assert status == wanted and words in message, message


def dense(call):
    """out and lse, each row by itself in float64."""
    keys, values = (
        x[call.table].reshape(BATCH, -1, HEADS_KV, DIM)[:, :KEYS].astype(np.float64) for x in (call.k, call.v)
    )
    out, lse = np.zeros(call.q.shape), np.zeros(call.lse.shape)
    for b, i, h in np.ndindex(BATCH, ROWS, HEADS_Q):
        end, hk = KEYS - ROWS + i + 1, h // (HEADS_Q // HEADS_KV)
        scores = keys[b, :end, hk] @ call.q[b, i, h].astype(np.float64) * DIM**-0.5
        lse[b, h, i] = np.log(np.exp(scores).sum())
        out[b, i, h] = np.exp(scores - lse[b, h, i]) @ values[b, :end, hk]
    return out, lse


@pytest.mark.parametrize("backend", [b"cpu", b"reference", None])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_call_is_causal_with_and_without_a_mask(backend, with_mask):
    call = Call()
    if with_mask:
        call.args.mask = C.pointer(call.mask)
    assert call.run(capi.make(capi.Options, backend=backend)) == capi.OK, lib.fm_last_error()
    for got, want in zip((call.out, call.lse), dense(call)):
        assert np.abs(got - want).max() < 1e-5


def test_lse_and_seqlens_may_be_absent():
    call = Call()
    call.args.lse = call.cache.seqlens = capi.Tensor()
    assert call.run() == capi.OK and np.isfinite(call.out).all() and np.isnan(call.lse).all()


ZEROED = (capi.CachedArgs, capi.KvCache, capi.SequenceMask, capi.CachedPlan, capi.AppendArgs)


@pytest.mark.parametrize("kind", ZEROED)
@pytest.mark.parametrize("has_size", [False, True])
def test_zeros_are_refused_with_a_message(kind, has_size):
    call, size = Call(), C.c_size_t()
    zeros = capi.make(kind) if has_size else kind()
    if kind is capi.CachedArgs:
        status = lib.fm_cached_forward(C.byref(zeros), None, 0, None)
        words = "cache is NULL" if has_size else "args->struct_size is 0"
    elif kind is capi.AppendArgs:
        status = lib.fm_append_kv(C.byref(zeros), None)
        words = "cache is NULL" if has_size else "args->struct_size is 0"
    elif kind is capi.CachedPlan:
        status = lib.fm_cached_plan_bytes(C.byref(zeros), None, C.byref(size))
        words = "heads_q is 0" if has_size else "plan->struct_size is 0"
    elif kind is capi.KvCache:
        call.args.cache = C.pointer(zeros)
        status, words = call.run(), "cache.k" if has_size else "cache->struct_size is 0"
    else:
        call.args.mask = C.pointer(zeros)
        if has_size:  # a mask of nothing hides nothing
            assert call.run() == capi.OK
            return
        status, words = call.run(), "mask->struct_size is 0"
    refused(status, capi.INVALID_ARGUMENT, words)


@pytest.mark.parametrize("name", ["args", "cache", "mask"])
def test_sizes_that_no_version_has(name):
    call = Call()
    call.args.mask = C.pointer(call.mask)
    struct = getattr(call, name)
    right = struct.struct_size
    for size in (right - 8, right + 4, 1, 2**32 - 1):
        struct.struct_size = size
        refused(call.run(), capi.INVALID_ARGUMENT, f"{name}->struct_size is {size}, ")


def test_larger_structs_have_zeros_in_what_is_not_known():
    call = Call()
    larger = (C.c_char * (C.sizeof(capi.KvCache) + 16))()
    C.memmove(larger, C.byref(call.cache), C.sizeof(capi.KvCache))
    call.args.cache = C.cast(larger, C.POINTER(capi.KvCache))
    call.args.cache.contents.struct_size = len(larger)
    assert call.run() == capi.OK
    larger[-1] = b"\1"
    refused(call.run(), capi.UNSUPPORTED, "cache has fields that this version of the library does not know")


@pytest.mark.parametrize(
    "name, field, value, words",
    [
        ("cache", "reserved", 7, "cache->reserved is 7; it must be zero"),
        ("args", "flags", 1 << 20, "args"),
        ("args", "flags", capi.KEYS_IN_PAGES, "args"),
        ("mask", "flags", capi.BATCH_INVARIANT, "mask"),
    ],
)
def test_reserved_fields_and_flags_of_others(name, field, value, words):
    call = Call()
    call.args.mask = C.pointer(call.mask)
    setattr(getattr(call, name), field, value)
    refused(call.run(), capi.UNSUPPORTED, words)


def test_null_pointers():
    call, size = Call(), C.c_size_t()
    refused(lib.fm_cached_forward_workspace(C.byref(call.args), None, None), capi.INVALID_ARGUMENT, "bytes is NULL")
    refused(lib.fm_cached_forward_workspace(None, None, C.byref(size)), capi.INVALID_ARGUMENT, "args is NULL")
    refused(lib.fm_cached_plan_build(C.byref(call.args), None, None), capi.INVALID_ARGUMENT, "plan is NULL")
    refused(lib.fm_cached_validate(None), capi.INVALID_ARGUMENT, "args is NULL")
    call.args.cache = None
    refused(call.run(), capi.INVALID_ARGUMENT, "cache is NULL")


def test_tensors_without_memory():
    call = Call()
    for name in ("q", "out", "lse"):
        address = getattr(call.args, name).data
        getattr(call.args, name).data = None
        assert call.bytes()[0] == capi.OK and lib.fm_cached_validate(C.byref(call.args)) == capi.OK
        refused(call.run(), capi.INVALID_ARGUMENT, name)
        getattr(call.args, name).data = address
    assert call.run() == capi.OK


@pytest.mark.parametrize("name", ["page_table", "seqlens"])
def test_values_that_cannot_be_read_are_not_validated(name):
    call = Call()
    tensor = getattr(call.cache, name)
    tensor.data = tensor.data + 1
    for words in (f"the address of {name} is not a multiple of 4", f"{name} has no data"):
        refused(lib.fm_cached_validate(C.byref(call.args)), capi.INVALID_ARGUMENT, words)
        refused(call.run(), capi.INVALID_ARGUMENT, words)
        tensor.data = None


def test_a_workspace_that_is_too_small():
    call = Call()
    options = capi.make(capi.Options, threads=1)
    status, size = call.bytes(options)
    assert status == capi.OK and size > 0
    refused(call.run(options, less=1), capi.INVALID_ARGUMENT, f"workspace has {size - 1} bytes")
    assert np.isnan(call.out).all()


@pytest.mark.parametrize("gives", [True, False])
def test_a_workspace_from_a_callback(gives):
    call, asked = Call(), []

    @core.Allocate
    def allocate(context, size):
        asked.append((context, np.full(size, 255, np.uint8)))
        return asked[-1][1].ctypes.data if gives else None

    options = capi.make(capi.Options, allocate=C.cast(allocate, C.c_void_p), allocate_context=77, threads=1)
    status, size = call.bytes(options)
    assert status == capi.OK and not asked
    status = lib.fm_cached_forward(C.byref(call.args), None, 0, C.byref(options))
    assert [(context, memory.size) for context, memory in asked] == [(77, size)]
    if not gives:
        refused(status, capi.OUT_OF_MEMORY, "allocate")
        assert np.isnan(call.out).all()
        return
    assert status == capi.OK and np.abs(call.out - dense(call)[0]).max() < 1e-5


def test_a_plan_serves_the_calls_that_it_was_built_for():
    call, size = Call(), C.c_size_t()
    room = {"max_batch": 2, "max_rows": 4, "max_keys": 8}
    plan = capi.make(capi.CachedPlan, **room, heads_q=HEADS_Q, heads_kv=HEADS_KV, head_dim=DIM, head_dim_v=DIM)
    assert lib.fm_cached_plan_bytes(C.byref(plan), None, C.byref(size)) == capi.OK
    buffer = np.zeros((size.value + 15) // 16 * 2, np.uint64)
    plan.buffer, plan.bytes = buffer.ctypes.data, size.value
    call.args.plan = C.pointer(plan)
    refused(call.run(), capi.INVALID_ARGUMENT, "plan was never built")
    assert lib.fm_cached_plan_build(C.byref(call.args), C.byref(plan), None) == capi.OK and any(plan.built_for)
    assert call.run() == capi.OK
    other = call.seqlens.copy()
    call.cache.seqlens = capi.tensor(other)
    refused(call.run(), capi.INVALID_ARGUMENT, "seqlens is another")


def test_validate_and_explain():
    call = Call()
    assert lib.fm_cached_validate(C.byref(call.args)) == capi.OK
    status, text = capi.text_of(lib.fm_explain_cached, C.byref(call.args), None)
    assert status == capi.OK and '"backend": "cpu"' in text
    call.table[1, 0] = 5
    refused(lib.fm_cached_validate(C.byref(call.args)), capi.INVALID_ARGUMENT, "page_table has page 5")


def test_appending():
    call = Call()
    k, v = (np.full((BATCH, 1, HEADS_KV, DIM), value, np.float32) for value in (2, 3))
    args = capi.make(capi.AppendArgs, k=k, v=v, cache=C.pointer(call.cache))
    assert lib.fm_append_kv(C.byref(args), None) == capi.OK
    last = call.table[:, (KEYS - 1) // PAGE_SIZE], (KEYS - 1) % PAGE_SIZE
    assert (call.k[last] == 2).all() and (call.v[last] == 3).all()
    assert (call.k == 2).sum() == k.size
    args.flags = capi.KEYS_IN_PAGES
    refused(lib.fm_append_kv(C.byref(args), None), capi.UNSUPPORTED, "args->flags")
    args.flags = capi.WRITE_SCALES
    refused(lib.fm_append_kv(C.byref(args), None), capi.INVALID_ARGUMENT, "write_scales is set and k_scale is absent")


def test_appending_writes_scales_of_pages():
    call = Call()
    k, v = (np.full((BATCH, 1, HEADS_KV, DIM), value, np.float32) for value in (3, 500))
    stored = [np.zeros(x.shape, np.uint8) for x in (call.k, call.v)]
    scales = [np.ones((len(call.k), 1, 1), np.float32) for _ in range(2)]
    names = {"k": stored[0], "v": stored[1], "k_scale": scales[0], "v_scale": scales[1]}
    for name, x in names.items():
        setattr(call.cache, name, capi.tensor(x))
    args = capi.make(capi.AppendArgs, k=k, v=v, cache=C.pointer(call.cache), flags=capi.WRITE_SCALES)
    assert lib.fm_append_kv(C.byref(args), None) == capi.OK, lib.fm_last_error()
    page, slot = call.table[:, (KEYS - 1) // PAGE_SIZE], (KEYS - 1) % PAGE_SIZE
    assert slot > 0 and (scales[0] == 1).all() and (scales[1][page] == 2).all() and (scales[1] == 2).sum() == BATCH
    assert (stored[1][page, slot] == 0x78).all()  # 256: 250, rounded to a multiple of 16
    call.cache.v_scale = capi.tensor(np.ones(HEADS_KV, np.float32))
    refused(lib.fm_append_kv(C.byref(args), None), capi.INVALID_ARGUMENT, "v_scale is shared by pages")


def test_slots_leave_alone_the_bounds_of_sequences():
    call = Call()
    k, v = (np.full((1, HEADS_KV, DIM), value, np.float32) for value in (2, 3))
    call.mask.bounds = capi.tensor(np.full((BATCH, 1, KEYS, 1), 9, np.int32))
    args = capi.make(capi.AppendArgs, k=k, v=v, slots=np.array([6], np.int32), cache=C.pointer(call.cache))
    args.mask = C.pointer(call.mask)
    assert lib.fm_append_kv(C.byref(args), None) == capi.OK, lib.fm_last_error()
    assert (call.k[1, 2] == 2).all() and (call.k == 2).sum() == k.size
    vectors = np.zeros((1, 1, 1), np.int32)
    args.bounds = capi.tensor(vectors)
    refused(lib.fm_append_kv(C.byref(args), None), capi.INVALID_ARGUMENT, "mask.bounds lies by sequences")


def test_an_append_reads_no_tail_of_the_mask():
    call = Call()
    k, v = (np.zeros((BATCH, 1, HEADS_KV, DIM), np.float32) for _ in "kv")
    call.mask.tail = capi.tensor(np.zeros((BATCH, 1, 1), np.int32))
    call.mask.tail_lens = capi.device_tensor(None, capi.INT32, (BATCH,))
    args = capi.make(capi.AppendArgs, k=k, v=v, cache=C.pointer(call.cache), mask=C.pointer(call.mask))
    assert lib.fm_append_kv(C.byref(args), None) == capi.OK, lib.fm_last_error()
