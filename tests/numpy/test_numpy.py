# SPDX-License-Identifier: Apache-2.0
"""flashmask.numpy: forward and backward against dense attention in float64, its Mask, and what it refuses."""

import inspect
import subprocess
import sys

import dense
import flashmask.numpy as fm
import ml_dtypes
import numpy as np
import pytest
from flashmask import capi
from flashmask._core.docstrings import PARAGRAPHS
from flashmask.numpy.arrays import Numpy

# Largest error of out and of the gradients, relative to the largest element.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


def dtype_named(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def draw(rng, seqlen_q, seqlen_k, dtype="float32", batch=2, heads=(4, 2), dims=(32, 16)):
    """(dout, q, k, v)."""
    shapes = [(seqlen_q, heads[0], dims[1]), (seqlen_q, heads[0], dims[0]), (seqlen_k, heads[1], dims[0])]
    shapes.append((seqlen_k, heads[1], dims[1]))
    return [rng.standard_normal((batch, *shape)).astype(dtype_named(dtype)) for shape in shapes]


def assert_close(got, want, dtype, tolerance=None):
    assert got.dtype.name == dtype and got.shape == want.shape
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite].astype(np.float64), want[~finite])
    error = np.abs(got[finite].astype(np.float64) - want[finite]).max(initial=0)
    assert error <= (tolerance or TOLERANCES[dtype]) * np.abs(want[finite]).max(initial=1e-30), error


def check(dout, q, k, v, mask, dlse=None, **options):
    """attention and attention_backward against dense attention."""
    dtype = q.dtype.name
    scale = options.get("softmax_scale")
    features = {name: options[name] for name in ("softcap", "sink") if name in options}
    if p := options.get("dropout"):
        kept = fm.dropout_mask(options["dropout_state"], p, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        features["kept"] = kept * (65536 / (65536 - round(p * 65536)))
    if (slopes := options.get("alibi_slopes")) is not None:
        row = np.arange(q.shape[1]) + mask.q_offset if mask.q_pos is None else mask.q_pos
        key = np.arange(k.shape[1]) if mask.k_pos is None else mask.k_pos
        distance = np.abs(np.atleast_2d(row)[:, None, :, None] - np.atleast_2d(key)[:, None, None].astype(np.float64))
        features["bias"] = -np.atleast_2d(slopes)[..., None, None] * distance
    visible = np.ones((1, 1, q.shape[1], k.shape[1]), bool) if mask is None else dense.visible(mask)
    out, lse = fm.attention(q, k, v, mask, **options)
    want_out, want_lse, *_ = dense.attention(q, k, v, visible, scale, **features)
    assert_close(out, want_out, dtype)
    assert_close(lse, want_lse, "float64" if dtype == "float64" else "float32")
    got = fm.attention_backward(dout, q, k, v, out, lse, mask, dlse=dlse, **options)
    wanted = dense.gradients(dout, q, k, v, visible, dlse, scale, **features)
    for x, gradient, want in zip(
        (q, k, v, *([features["sink"]] if "sink" in features else [])), got, wanted, strict=True
    ):
        # A sink's gradient is made of out, which has been rounded to the tensors' dtype.
        assert_close(gradient, want, x.dtype.name, max(TOLERANCES[dtype], TOLERANCES[x.dtype.name]))


@pytest.mark.parametrize(
    "dtype, backend", [(name, "auto") for name in list(TOLERANCES)[1:]] + [("float64", "reference")]
)
def test_dtypes(rng, dtype, backend):
    ends = np.repeat([70, 150, 200], [70, 80, 50]).reshape(1, 1, 200, 1)
    check(*draw(rng, 200, 200, dtype), fm.Mask(200, 200, bounds=ends, causal=True), backend=backend)


@pytest.mark.parametrize("causal, vectors", [(True, 1), (True, 2), (False, 2), (False, 4)])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_vector_forms_heads_band_and_block_mask(rng, causal, vectors, heads):
    bounds = rng.integers(-3, 145, (2, heads, 200, vectors))
    keep = rng.integers(0, 2, (1, heads, 2, 2)).astype(bool)
    keep[..., 0, 0] = True
    mask = fm.Mask(140, 200, bounds=bounds, causal=causal, window=(60, 5), q_offset=50, block_mask=keep)
    assert np.array_equal(mask.to_dense(), np.broadcast_to(dense.visible(mask), (2, heads, 140, 200)))
    check(*draw(rng, 140, 200), mask)
    check(*draw(rng, 140, 200), mask.replace(q_offset=None, window=None, block_mask=None))


def test_without_a_mask_and_with_options(rng):
    check(*draw(rng, 30, 70), None, softmax_scale=0.3, threads=1)
    check(*draw(rng, 70, 30), fm.Mask(70, 30, causal=True), backend="reference")  # the first 40 rows see nothing
    check(*draw(rng, 0, 5), None)
    check(*draw(rng, 5, 0), None)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_features(rng, dtype):
    """Some rows see nothing but the sink."""
    backend = "reference" if dtype == "float64" else "cpu"
    mask = fm.Mask(90, 70, causal=True, window=(20, 0), q_offset=-10)
    dlse = rng.standard_normal((2, 4, 90)).astype("float64" if dtype == "float64" else "float32")
    sink = rng.standard_normal(4).astype("float32")
    slopes = rng.standard_normal((2, 4)).astype("float32") / 8
    for features in (
        {"alibi_slopes": slopes},
        {"alibi_slopes": slopes.T.copy().T[0], "softcap": 3.0, "sink": sink},
        {"softcap": 1.5},
        *([] if dtype == "float64" else [{"split_size": 128, "softcap": 3.0, "sink": sink, "alibi_slopes": slopes}]),
        {"sink": sink},
        {"sink": sink.astype(dtype_named(dtype)), "softcap": 20},
        {"sink": np.repeat(sink, 2)[::2]},
        {"dropout": 0.2, "dropout_state": np.array([3, -4])},
        {"dropout": 0.5, "dropout_state": np.array([3, 0, 2**64 - 4, 0], np.uint64)[::2], "sink": sink, "softcap": 9.0},
    ):
        check(*draw(rng, 90, 70, dtype), mask, dlse, backend=backend, **features)


@pytest.mark.parametrize("batches", [(1, 1), (1, 2), (2, 2)])
def test_positions(rng, batches):
    q_pos, k_pos = (rng.integers(-9, 60, shape).astype(np.int32) for shape in zip(batches, (90, 70)))
    bounds = rng.integers(0, 90, (1, 2, 70, 2))
    mask = fm.Mask(90, 70, bounds=bounds, window=(20, 3), q_pos=q_pos, k_pos=k_pos)
    assert mask.batch == max(batches) and mask.heads == 2
    assert np.array_equal(mask.to_dense(), np.broadcast_to(dense.visible(mask), (max(batches), 2, 90, 70)))
    check(*draw(rng, 90, 70), mask)
    check(*draw(rng, 90, 70), mask, alibi_slopes=np.array([0.25, 0.125, -0.5, 0], "float32"))
    given = {"window_size": (20, 3), "q_pos": q_pos, "k_pos": k_pos}
    dout, q, k, v = draw(rng, 90, 70)
    out, lse = fm.attention(q, k, v, mask)
    assert np.array_equal(fm.attention(q, k, v, bounds, **given)[0], out)
    for x, y in zip(
        fm.attention_backward(dout, q, k, v, out, lse, bounds, **given),
        fm.attention_backward(dout, q, k, v, out, lse, mask),
        strict=True,
    ):
        assert np.array_equal(x, y)
    assert "positions" in fm.explain(q, k, v, bounds, **given)


def test_positions_that_do_not_fit(rng):
    _, q, k, v = draw(rng, 90, 70)
    q_pos, k_pos = np.zeros((1, 90), np.int32), np.zeros((1, 70), np.int32)
    for given, text in (
        ({"q_pos": q_pos}, "k_pos is absent and q_pos is given"),
        ({"q_pos": q_pos, "k_pos": k_pos.astype(np.int64)}, "k_pos is int64"),
        ({"q_pos": q_pos, "k_pos": q_pos}, r"k_pos is int32 \[1, 90\]"),
        ({"q_pos": q_pos, "k_pos": k_pos, "q_offset": 3}, "q_offset is 3"),
        ({"mask": fm.Mask(90, 70), "q_pos": q_pos, "k_pos": k_pos}, "q_pos"),
    ):
        with pytest.raises(ValueError, match=text):
            fm.attention(q, k, v, **given)


def test_gradient_of_lse(rng):
    dlse = rng.standard_normal((2, 4, 90)).astype(np.float32)
    check(*draw(rng, 90, 90), fm.Mask(90, 90, causal=True), dlse=dlse)


def test_arguments_say_what_a_mask_says(rng):
    dout, q, k, v = draw(rng, 150, 150)
    bounds = rng.integers(0, 151, (1, 1, 150, 1))
    keep = np.array([[[[1, 0], [1, 1]]]], np.int32)
    given = {"causal": True, "window_size": (40, 0), "q_offset": 3, "block_mask": keep}
    mask = fm.Mask(150, 150, bounds=bounds, causal=True, window=(40, 0), q_offset=3, block_mask=keep)
    out, lse = fm.attention(q, k, v, mask)
    for a, b in zip((out, lse), fm.attention(q, k, v, bounds, **given)):
        assert np.array_equal(a, b)
    for a, b in zip(
        fm.attention_backward(dout, q, k, v, out, lse, mask),
        fm.attention_backward(dout, q, k, v, out, lse, bounds, **given),
    ):
        assert np.array_equal(a, b)


def test_strides_are_read_in_place(rng):
    packed = rng.standard_normal((2, 50, 3, 4, 32)).astype(np.float32)
    q, k, v = packed[:, ::2, 0], packed[:, :, 1, :2], packed[:, :, 2, 2:]
    dout = rng.standard_normal((2, 4, 25, 32)).astype(np.float32).swapaxes(1, 2)
    check(dout, q, k, v, fm.Mask(25, 50, causal=True))


@pytest.mark.parametrize("names", ["dout", "q", "k", "v", "qkv"])
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_broadcast_inputs(rng, axes, names):
    """Their strides are 0, and the gradients' are not."""
    names = ("dout",) if names == "dout" else tuple(names)

    def widened(x):
        first = tuple(slice(1) if axis in axes else slice(None) for axis in range(4))
        return np.broadcast_to(x[first], x.shape)

    dout, q, k, v = draw(rng, 40, 40, heads=(4, 4))
    given = {"dout": dout, "q": q, "k": k, "v": v}
    given |= {name: widened(given[name]) for name in names}
    bounds = np.broadcast_to(np.int32(30), (2, 4, 40, 1))
    dlse = np.broadcast_to(np.float32(2), (2, 4, 40))
    check(*given.values(), fm.Mask(40, 40, bounds=bounds, causal=True), dlse=dlse)
    got = fm.attention(*list(given.values())[1:])
    for x in (*got, *fm.attention_backward(given["dout"], *list(given.values())[1:], *got)):
        assert x.flags.writeable and 0 not in x.strides and x.strides[-1] == x.itemsize


@pytest.mark.parametrize("q_offset", [2**40 + 1, -(2**40) - 1, 2**63, 2**64 + 5, -(10**30)])
def test_an_offset_beyond_all_sequences_is_refused(q_offset):
    for make in (lambda: fm.Mask(8, 8, causal=True, q_offset=q_offset), lambda: fm.masks.causal(8, q_offset=q_offset)):
        with pytest.raises(ValueError, match=rf"q_offset is {q_offset}; it must be between -2\^40 and 2\^40"):
            make()
    for far in (2**40, -(2**40)):
        assert (fm.Mask(8, 8, causal=True, q_offset=far).to_dense() == (far > 0)).all()


def test_layouts_agree_and_gradients_have_the_memory_of_their_tensors(rng):
    dout, q, k, v = draw(rng, 40, 60)
    want = fm.attention(q, k, v, causal=True)
    bhsd = [x.swapaxes(1, 2).copy() for x in (dout, q, k, v)]
    out, lse = fm.attention(*bhsd[1:], causal=True, layout="bhsd")
    assert np.array_equal(out.swapaxes(1, 2), want[0]) and np.array_equal(lse, want[1])
    wanted = fm.attention_backward(dout, q, k, v, *want, causal=True)
    got = fm.attention_backward(*bhsd, out, lse, causal=True, layout="bhsd")
    for x, gradient, expected in zip(bhsd[1:], got, wanted):
        assert gradient.strides == x.strides and np.array_equal(gradient.swapaxes(1, 2), expected)


@pytest.mark.parametrize(
    "change, raised, words",
    [
        ({"q": [1.0]}, TypeError, r"q is \[1.0\] \(list\); it must be a numpy array"),
        ({"k": np.zeros((8, 8), np.float32)}, ValueError, r"k has shape \[8, 8\]; it must have 4 dimensions"),
        ({"k": np.zeros((1, 8, 2, 4), np.float32)}, ValueError, r"k is float32 \[1, 8, 2, 4\]"),
        ({"v": np.zeros((1, 8, 2, 8), np.int16)}, ValueError, r"v is int16 \[1, 8, 2, 8\]; the dtypes"),
        ({"v": np.zeros((1, 8, 2, 8), ">f4")}, ValueError, "byte order"),
        ({"q": np.zeros((1, 8, 2, 16), np.float32)[..., ::2]}, ValueError, "contiguous"),
        ({"q": np.zeros((1, 8, 2, 8), np.float32)[:, ::-1]}, ValueError, "strides must be at least 0"),
        ({"q": np.zeros((1, 8, 2, 8), [("x", "f4"), ("y", "u1")])["x"]}, ValueError, "not whole elements"),
        ({name: np.zeros((1, 8, 2, 8)) for name in "qkv"}, fm.UnsupportedError, "reference"),
        ({"layout": "sbhd"}, ValueError, "layout is 'sbhd'"),
        ({"backend": None}, TypeError, "backend is None"),
        ({"backend": "tpu"}, ValueError, "tpu"),
        ({"threads": -1}, ValueError, "threads is -1"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale"),
        ({"softcap": -2.0}, ValueError, "softcap is -2"),
        (
            {"dropout": 1.0, "dropout_state": np.zeros(2, np.int64)},
            ValueError,
            "dropout is 1.0; it must be at least 0 and less than 1",
        ),
        ({"dropout": 0.1}, ValueError, "dropout is 0.1 without dropout_state"),
        ({"dropout": 0.1, "dropout_state": np.zeros(2)}, ValueError, r"it must be int64 or uint64 \[2\]"),
        ({"dropout": 0.1, "dropout_state": np.zeros(3, np.int64)}, ValueError, r"it must be int64 or uint64 \[2\]"),
        ({"dropout": 0.1, "dropout_state": [1, 2]}, TypeError, "dropout_state is .*; it must be a numpy array"),
        ({"softcap": None}, TypeError, "softcap is None"),
        ({"sink": [0.0, 0.0]}, TypeError, "sink is .*; it must be a numpy array"),
        ({"alibi_slopes": [0.0, 0.0]}, TypeError, "alibi_slopes is .*; it must be a numpy array"),
        ({"sink": np.zeros(3, np.float32)}, ValueError, r"sink is float32 \[3\]; it must be float32 \[2\]"),
        ({"window_size": (-2, 0)}, ValueError, "window_size"),
        ({"mask": np.zeros((1, 1, 8, 1), np.int32)}, ValueError, "causal is false"),
        ({"mask": np.ones((8, 8), bool)}, TypeError, "not a dense mask"),
        ({"mask": fm.Mask(9, 8)}, ValueError, "the mask is for 9 query rows and 8 keys"),
        ({"mask": fm.Mask(8, 8), "causal": True}, ValueError, "causal is given beside a Mask"),
        ({"block_mask": np.ones((1, 1, 2, 1), bool)}, ValueError, r"block_mask is bool \[1, 1, 2, 1\]"),
    ],
)
def test_what_is_refused(change, raised, words):
    given = {**{name: np.zeros((1, 8, 2, 8), np.float32) for name in "qkv"}, **change}
    with pytest.raises(raised, match=words) as error:
        fm.attention(**given)
    assert fm.explain(**given) == f"refused   {error.value}" or "refused: " in fm.explain(**given)


def test_wrong_arguments_of_the_backward():
    q = np.zeros((1, 8, 2, 8), np.float32)
    out, lse = fm.attention(q, q, q)
    for given, words in (({"dout": q[:, :4]}, "dout"), ({"lse": lse[:, :1]}, "lse"), ({"dlse": lse[:, :1]}, "dlse")):
        with pytest.raises(ValueError, match=f"^{words} is float32"):
            fm.attention_backward(**{"dout": q, "q": q, "k": q, "v": q, "out": out, "lse": lse, **given})


def test_a_mask_does_not_change_and_shows_itself():
    bounds = np.zeros((1, 2, 300, 2), np.int32)
    mask = fm.Mask(300, 300, bounds=bounds, causal=True)
    assert mask.bounds is bounds and (mask.batch, mask.heads) == (1, 2)
    assert repr(mask) == "Mask(300, 300: causal; LTS, LTE of each key, batch 1, heads 2; row 0 at key 0)"
    with pytest.raises(AttributeError):
        mask.causal = False
    with pytest.raises(ValueError, match="third dimension"):
        fm.Mask(300, 299, bounds=bounds, causal=True)


def test_explain_says_what_runs():
    q = np.zeros((2, 300, 4, 64), np.float32)
    text = fm.explain(q, q, q, causal=True)
    for line in (
        "query     [2, 300, 4, 64] float32 on cpu",
        "mask      causal; row 0 at key 0",
        "tiles     9 of 128x128: 3 full, 3 partial, 3 skipped",
        "forward   backend: cpu",
        "backward  backend: cpu",
        "the same bits in every run",
    ):
        assert line in text, text
    assert fm.explain(*[q.astype(np.float64)] * 3).endswith("nearest   cast query, key and value to float32")


def test_the_three_calls_take_the_same_arguments():
    forward, backward, explain = (
        inspect.signature(x).parameters for x in (fm.attention, fm.attention_backward, fm.explain)
    )
    assert list(forward.values()) == list(explain.values())
    assert list(backward) == ["dout", *list(forward)[:3], "out", "lse", "mask", "dlse", *list(forward)[4:]]


def test_docstrings_are_composed():
    for documented in (fm.Mask, fm.attention, fm.attention_backward, fm.explain):
        assert "{" not in documented.__doc__ and documented.__doc__.strip()
    text = inspect.getdoc(fm.attention)
    assert PARAGRAPHS["raises"] in text and f"\n{PARAGRAPHS['softmax_scale']}\n" in text
    assert inspect.getdoc(fm.Mask).startswith(PARAGRAPHS["mask"])


def test_import_needs_no_other_front():
    """Nor does it load the library, which the first call does."""
    program = """
import sys
for name in ("torch", "jax", "paddle"):
    sys.modules[name] = None  # cannot be imported
import flashmask.numpy as fm, numpy as np
assert not [line for line in open("/proc/self/maps") if "libflashmask" in line]
q = np.ones((1, 5, 1, 8), np.float32)
out, lse = fm.attention(q, q, q, causal=True)
assert np.allclose(out, 1) and fm.explain(q, q, q).startswith("query")
print(*sorted(name for name in sys.modules if name.startswith("flashmask")))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not {"flashmask.torch", "flashmask.paddle", "flashmask.jax"} & set(ran.stdout.split())


def test_in_a_fork_of_a_process_that_has_used_it():
    program = """
import multiprocessing, signal
import flashmask.numpy as fm, numpy as np
q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 500, 4, 64)).astype(np.float32)
def attend(_):
    signal.alarm(30)  # a child that hangs is killed, and its pool would wait for it forever
    out, lse = fm.attention(q, k, v, causal=True, threads=2)
    return out, lse, *fm.attention_backward(dout, q, k, v, out, lse, causal=True)
here = attend(0)
with multiprocessing.get_context("fork").Pool(2) as pool:
    for there in pool.map(attend, range(4)):
        assert all(np.array_equal(a, b) for a, b in zip(here, there, strict=True))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_without_numpy_it_says_so():
    program = "import sys; sys.modules['numpy'] = None; import flashmask.capi; import flashmask.numpy"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: flashmask.numpy needs numpy: pip install numpy" in ran.stderr


def test_a_call_asks_for_its_workspace_once(monkeypatch):
    """The call itself asks for it; an error in there is raised after the call."""
    sizes, empty = [], Numpy.empty
    q = np.ones((1, 300, 2, 16), np.float32)

    def counted(shape, dtype, like):
        sizes.extend([shape] if dtype == "uint8" else [])
        return empty(shape, dtype, like)

    def failing(shape, dtype, like):
        if dtype == "uint8":
            raise MemoryError("no room")
        return empty(shape, dtype, like)

    monkeypatch.setattr(Numpy, "empty", counted)
    monkeypatch.delattr(capi.load(), "fm_forward_workspace")
    out, lse = fm.attention(q, q, q, causal=True)
    fm.attention_backward(out, q, q, q, out, lse, causal=True)
    assert len(sizes) == 2
    monkeypatch.setattr(Numpy, "empty", failing)
    with pytest.raises(MemoryError, match="no room"):
        fm.attention(q, q, q, causal=True)
