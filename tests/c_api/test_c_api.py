# SPDX-License-Identifier: Apache-2.0
"""Attention through ctypes and numpy alone, against a softmax written in numpy."""

import ctypes as C

import numpy as np
import pytest
from flashmask import capi
from flashmask._core import capi as core
from flashmask.errors import UnrepresentableMaskError, UnsupportedError

lib = capi.load()


def last_error():
    return lib.fm_last_error().decode()


def check(status):
    assert status == capi.OK, last_error()


def reference(q, k, v, dout, visible, scale):
    """Forward and gradients in float64; q [B, Sq, H, D], visible [Sq, Sk]; heads_q == heads_kv."""
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    s = np.where(visible, np.einsum("bihd,bjhd->bhij", q, k) * scale, -np.inf)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(m), m, 0))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + m, -np.inf)[..., 0]
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return (
        np.einsum("bhij,bjhd->bihd", p, v),
        lse,
        np.einsum("bhij,bjhd->bihd", ds, k),
        np.einsum("bhij,bihd->bjhd", ds, q),
        np.einsum("bhij,bihd->bjhd", p, dout),
    )


def run(q, k, v, dout, mask=None, plan=None, options=None, dense=None):
    out, lse = (
        np.full(q.shape[:3] + v.shape[3:], np.nan, q.dtype),
        np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32),
    )
    dq, dk, dv = (np.full_like(x, np.nan) for x in (q, k, v))
    common = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    if mask is not None:
        common["mask"] = C.pointer(mask)
    if plan is not None:
        common["plan"], common["plan_bytes"] = plan.ctypes.data, plan.nbytes
    if dense is not None:
        common["dense_mask"] = dense
    opts = C.byref(options) if options is not None else None
    for workspace_of, call, args in (
        (lib.fm_forward_workspace, lib.fm_forward, capi.make(capi.ForwardArgs, **common)),
        (
            lib.fm_backward_workspace,
            lib.fm_backward,
            capi.make(capi.BackwardArgs, **common, dout=dout, dq=dq, dk=dk, dv=dv),
        ),
    ):
        size = C.c_size_t()
        check(workspace_of(C.byref(args), opts, C.byref(size)))
        workspace = np.full(size.value, 255, np.uint8)
        check(call(C.byref(args), workspace.ctypes.data_as(C.c_void_p), size, opts))
    return out, lse, dq, dk, dv


def inputs(seed, batch, seqlen_q, seqlen_k, heads, dim):
    rng = np.random.default_rng(seed)
    shape = lambda s: (batch, s, heads, dim)
    return [rng.standard_normal(shape(s)).astype(np.float32) for s in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)]


def assert_matches(got, want):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want):
        assert a.dtype == np.float32
        finite = np.isfinite(b)
        assert np.array_equal(a[~finite], b[~finite]), name
        assert np.abs(a[finite] - b[finite]).max() <= 1e-5 * np.abs(b[finite]).max(), name


@pytest.mark.parametrize("named", [True, False])
def test_a_library_that_is_not_there(named, monkeypatch, tmp_path):
    monkeypatch.setattr(core, "__file__", str(tmp_path / "_core" / "capi.py"))
    monkeypatch.setenv("FLASHMASK_LIBRARY", str(tmp_path / "named.so") if named else "")
    with pytest.raises(ImportError, match="(?s)named.so is not there.*FLASHMASK_LIBRARY" if named else "libflashmask"):
        capi.load.__wrapped__()


def test_the_library_is_loaded_once():
    assert capi.load() is lib


@pytest.mark.parametrize(
    "fields, raised, words",
    [
        ({"struct_size": 1}, ValueError, "args->struct_size is 1"),
        ({"reserved": 7}, UnsupportedError, "args->reserved is 7"),
        ({"q": np.zeros((8, 8), np.float32)}, ValueError, "4 dimensions"),
    ],
)
def test_a_status_becomes_the_exception_that_it_means(fields, raised, words):
    status, _ = forward_error(**fields)
    with pytest.raises(raised, match=words):
        capi.check(status)


@pytest.mark.parametrize(
    "status, raised",
    [
        (capi.UNREPRESENTABLE, UnrepresentableMaskError),
        (capi.NO_DEVICE, RuntimeError),
        (capi.OUT_OF_MEMORY, MemoryError),
        (capi.INTERNAL, RuntimeError),
    ],
)
def test_the_exception_of_each_status(status, raised):
    with pytest.raises(Exception) as error:
        capi.check(status)
    assert type(error.value) is raised


def test_version():
    assert lib.fm_abi_version() == 1
    assert lib.fm_version().decode().count(".") == 2


def test_plan_validate():
    bounds = np.full((1, 1, 300, 1), 200, np.int32)
    mask = capi.mask(300, 300, flags=capi.CAUSAL, bounds=bounds)
    size = C.c_size_t()
    check(lib.fm_plan_bytes(C.byref(mask), C.byref(size)))
    plan = np.zeros(size.value, np.uint8)
    pointer = plan.ctypes.data_as(C.c_void_p)
    check(lib.fm_plan_build(C.byref(mask), pointer, size, None))
    check(lib.fm_plan_validate(C.byref(mask), pointer, size, None, C.c_size_t(0), None))
    bounds[0, 0, 7, 0] = 201  # changed in place
    assert lib.fm_plan_validate(C.byref(mask), pointer, size, None, C.c_size_t(0), None) == capi.INVALID_ARGUMENT
    assert b"build it anew" in lib.fm_last_error()


def test_device_memory_is_not_read():
    nowhere = 0x10000
    tensor = lambda dtype, *shape: capi.device_tensor(nowhere, dtype, shape)
    mask = capi.mask(
        300, 300, flags=capi.CAUSAL, bounds=tensor(capi.INT32, 2, 1, 300, 1), block_mask=tensor(capi.BOOL, 1, 1, 3, 3)
    )
    size, same = C.c_size_t(), C.c_size_t()
    check(lib.fm_plan_bytes(C.byref(mask), C.byref(size)))
    host = capi.mask(
        300,
        300,
        flags=capi.CAUSAL,
        bounds=np.zeros((2, 1, 300, 1), np.int32),
        block_mask=np.ones((1, 1, 3, 3), np.int32),
    )
    check(lib.fm_plan_bytes(C.byref(host), C.byref(same)))
    assert size.value == same.value
    # A device that is not there: an error, never a crash.
    options = capi.make(capi.Options, device=capi.cuda_device(63))
    assert lib.fm_plan_build(C.byref(mask), C.c_void_p(nowhere), size, C.byref(options)) == capi.NO_DEVICE
    q, lse = tensor(capi.BFLOAT16, 2, 300, 1, 64), tensor(capi.FLOAT32, 2, 1, 300)
    args = capi.make(
        capi.ForwardArgs, q=q, k=q, v=q, out=q, lse=lse, mask=C.pointer(mask), plan=nowhere, plan_bytes=size.value
    )
    assert lib.fm_forward_workspace(C.byref(args), C.byref(options), C.byref(size)) in (
        capi.NO_DEVICE,
        capi.UNSUPPORTED,
    )
    assert b"cuda: " in lib.fm_last_error()
    options.backend = b"cuda"
    assert lib.fm_forward_workspace(C.byref(args), C.byref(options), C.byref(size)) in (
        capi.NO_DEVICE,
        capi.UNSUPPORTED,
    )


def test_causal_document_from_lts():
    lengths = [30, 1, 70, 59]
    seqlen = sum(lengths)
    ends = np.repeat(np.cumsum(lengths), lengths)
    lts = ends.astype(np.int32).reshape(1, 1, seqlen, 1)
    q, k, v, dout = inputs(0, 2, seqlen, seqlen, 3, 32)
    i, j = np.mgrid[:seqlen, :seqlen]
    visible = (j <= i) & (ends[i] == ends[j])
    mask = capi.mask(seqlen, seqlen, flags=capi.CAUSAL, bounds=lts)
    assert_matches(run(q, k, v, dout, mask), reference(q, k, v, dout, visible, 32**-0.5))

    dense = np.zeros((1, 1, seqlen, seqlen), np.bool_)
    check(lib.fm_mask_to_dense(C.byref(mask), C.byref(capi.tensor(dense))))
    assert np.array_equal(dense[0, 0], visible)
    for a, b in zip(run(q, k, v, dout, mask), run(q, k, v, dout, dense=dense)):
        assert np.array_equal(a, b)


def test_all_vector_forms_window_offset_and_block_mask():
    rng = np.random.default_rng(1)
    seqlen_q, seqlen_k = 140, 200
    q, k, v, dout = inputs(1, 1, seqlen_q, seqlen_k, 2, 16)
    i, j = np.mgrid[:seqlen_q, :seqlen_k]
    for causal, n in ((True, 1), (True, 2), (False, 2), (False, 4)):
        bounds = rng.integers(-3, seqlen_q + 4, (1, 1, seqlen_k, n)).astype(np.int32)
        b = bounds[0, 0].T[:, None, :]
        if n == 1:
            hidden = i >= b[0]
        elif causal:
            hidden = (i >= b[0]) & (i < b[1])
        elif n == 2:
            hidden = (i >= b[0]) | (i < b[1])
        else:
            hidden = ((i >= b[0]) & (i < b[1])) | ((i >= b[2]) & (i < b[3]))
        keep = rng.integers(0, 2, (1, 1, 2, 2)).astype(np.int32)
        visible = ~hidden & (keep[0, 0][i // 128, j // 128] != 0)
        p = i + 50
        visible &= (j >= p - 60) & (j <= p + 5)
        if causal:
            visible &= j <= p
        mask = capi.mask(
            seqlen_q,
            seqlen_k,
            flags=(capi.CAUSAL if causal else 0) | capi.HAS_WINDOW | capi.HAS_Q_OFFSET,
            q_offset=50,
            window_left=60,
            window_right=5,
            bounds=bounds,
            block_mask=keep,
        )
        assert_matches(run(q, k, v, dout, mask), reference(q, k, v, dout, visible, 0.25))


def test_plan_options_and_counter():
    seqlen = 300
    q, k, v, dout = inputs(2, 1, seqlen, seqlen, 2, 8)
    mask = capi.mask(seqlen, seqlen, flags=capi.CAUSAL)
    size = C.c_size_t()
    check(lib.fm_plan_bytes(C.byref(mask), C.byref(size)))
    plan = np.zeros(size.value, np.uint8)
    check(lib.fm_plan_build(C.byref(mask), plan.ctypes.data_as(C.c_void_p), size, None))
    tiles = capi.ExecutedTiles()
    options = capi.make(
        capi.Options,
        flags=capi.HAS_SCALE,
        softmax_scale=0.5,
        threads=1,
        backend=b"cpu",
        executed_tiles=C.pointer(tiles),
    )
    i, j = np.mgrid[:seqlen, :seqlen]
    assert_matches(run(q, k, v, dout, mask, plan, options), reference(q, k, v, dout, j <= i, 0.5))
    assert tiles.forward == tiles.backward_rows == tiles.backward_keys == 2 * (1 + 1 + 2 + 2 + 3)

    other = capi.mask(seqlen, seqlen)
    args = capi.make(
        capi.ForwardArgs,
        q=q,
        k=k,
        v=v,
        out=q.copy(),
        lse=np.zeros((1, 2, seqlen), np.float32),
        mask=C.pointer(other),
        plan=plan.ctypes.data,
        plan_bytes=plan.nbytes,
    )
    assert lib.fm_forward_workspace(C.byref(args), None, C.byref(size)) == capi.INVALID_ARGUMENT
    assert "plan was not made for this mask" in last_error()


def test_explain():
    q, k, v, _ = inputs(3, 1, 64, 64, 1, 8)
    args = capi.make(capi.ForwardArgs, q=q, k=k, v=v, out=q.copy(), lse=np.zeros((1, 1, 64), np.float32))
    length = C.c_size_t()
    check(lib.fm_explain(C.byref(args), None, None, C.c_size_t(0), C.byref(length)))
    text = C.create_string_buffer(length.value + 1)
    check(lib.fm_explain(C.byref(args), None, text, C.c_size_t(len(text)), None))
    assert text.value.decode().startswith("backend: cpu") and len(text.value) == length.value
    short = C.create_string_buffer(8)
    check(lib.fm_explain(C.byref(args), None, short, C.c_size_t(8), None))
    assert short.value.decode() == "backend"


def forward_error(options=None, **changes):
    q, k, v, _ = inputs(4, 1, 8, 8, 1, 8)
    fields = {"q": q, "k": k, "v": v, "out": q.copy(), "lse": np.zeros((1, 1, 8), np.float32)}
    struct_size = changes.pop("struct_size", None)
    fields.update(changes)
    args = capi.make(capi.ForwardArgs, **fields)
    if struct_size is not None:
        args.struct_size = struct_size
    status = lib.fm_forward_workspace(
        C.byref(args), C.byref(options) if options is not None else None, C.byref(C.c_size_t())
    )
    return status, last_error()


@pytest.mark.parametrize(
    "change, status, words",
    [
        (
            {"k": np.zeros((1, 8, 1, 9), np.float32)},
            capi.INVALID_ARGUMENT,
            ["k is float32 [1, 8, 1, 9]", "[1, 8, 1, 8]"],
        ),
        ({"q": np.zeros((8, 8), np.float32)}, capi.INVALID_ARGUMENT, ["q", "4 dimensions"]),
        ({"struct_size": 0}, capi.INVALID_ARGUMENT, ["args->struct_size is 0"]),
        ({"reserved": 7}, capi.UNSUPPORTED, ["args->reserved is 7", "zero"]),
        ({"mask": C.pointer(capi.mask(8, 9))}, capi.INVALID_ARGUMENT, ["mask has lengths (8, 9)"]),
        ({"mask": C.pointer(capi.mask(8, 8, flags=1 << 20))}, capi.UNSUPPORTED, ["unknown bits"]),
        (
            {"mask": C.pointer(capi.mask(8, 8, bounds=np.zeros((1, 1, 8, 1), np.int32)))},
            capi.INVALID_ARGUMENT,
            ["causal is false", "accepted"],
        ),
        ({"mask": C.pointer(capi.mask(-1, 8))}, capi.INVALID_ARGUMENT, ["seqlen_q is -1"]),
    ],
)
def test_errors_have_a_status_and_a_message(change, status, words):
    got, message = forward_error(**change)
    assert got == status
    for word in words:
        assert word in message


def test_null_pointers_and_reserved_options():
    size = C.c_size_t()
    assert lib.fm_forward_workspace(None, None, C.byref(size)) == capi.INVALID_ARGUMENT
    assert "args is NULL" in last_error()
    assert lib.fm_plan_bytes(C.byref(capi.mask(8, 8)), None) == capi.INVALID_ARGUMENT
    for field, value in (
        ("reserved", (C.c_uint64 * 2)(0, 3)),
        ("partial_out", 2),
        ("kernels", b"sm90"),  # the CPU has none
    ):
        status, message = forward_error(options=capi.make(capi.Options, **{field: value}))
        assert status == capi.UNSUPPORTED and field in message, message
    assert forward_error(options=capi.make(capi.Options, backend=b"nonsense"))[0] == capi.INVALID_ARGUMENT
    assert forward_error(options=capi.make(capi.Options, device=1))[0] in (capi.NO_DEVICE, capi.UNSUPPORTED)


def test_structs_of_older_and_newer_callers():
    class Newer(C.Structure):
        _fields_ = capi.Options._fields_ + [("later", C.c_uint64)]

    newer = capi.make(Newer)
    assert forward_error(options=newer)[0] == capi.OK
    newer.later = 5
    status, message = forward_error(options=newer)
    assert status == capi.UNSUPPORTED and "does not know" in message

    newer.struct_size += 4  # ends within a field
    status, message = forward_error(options=newer)
    assert status == capi.INVALID_ARGUMENT and f"options->struct_size is {C.sizeof(Newer) + 4}" in message


@pytest.mark.parametrize(
    "struct, field, value",
    [
        (capi.Options, "allocate_context", 1 << 12),
        (capi.Options, "kernels", b"sm90"),
        (capi.Mask, "q_pos", np.zeros((1, 8), np.int32)),
        (capi.Mask, "k_pos", np.zeros((1, 8), np.int32)),
        (capi.BackwardArgs, "dsink", np.zeros(1, np.float32)),
    ],
)
def test_a_wrong_field_is_named(struct, field, value):
    q, k, v, _ = inputs(4, 1, 8, 8, 1, 8)
    tensors = {"out": q, "dout": q, "dq": q, "k": k, "v": v, "dk": k, "dv": v, "lse": np.zeros((1, 1, 8), np.float32)}
    structs = {
        capi.Options: capi.make(capi.Options),
        capi.Mask: capi.mask(8, 8),
        capi.BackwardArgs: capi.make(capi.BackwardArgs, q=q, **tensors),
    }
    changed = structs[struct]
    setattr(changed, field, capi.tensor(value) if isinstance(value, np.ndarray) else value)
    args, options = structs[capi.BackwardArgs], structs[capi.Options]
    args.mask = C.pointer(structs[capi.Mask])
    status = lib.fm_backward_workspace(C.byref(args), C.byref(options), C.byref(C.c_size_t()))
    assert status == (capi.UNSUPPORTED if field == "kernels" else capi.INVALID_ARGUMENT)
    assert field in last_error()
