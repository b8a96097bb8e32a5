# SPDX-License-Identifier: Apache-2.0
"""flashmask.paddle against dense attention written in Paddle: results, gradients, and what is refused."""

import inspect
import subprocess
import sys

import dense
import flashmask.paddle as fm
import numpy as np
import paddle
import pytest
from flashmask._core import ctypes_calls
from flashmask.paddle import flashmask_attention
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker
from paddle.distributed.fleet.utils import recompute

# Largest error of out and of the gradients, relative to the largest element.
TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def repeatable():
    paddle.seed(0)


def draw(seqlen_q=150, seqlen_k=150, dtype="float32", heads=(4, 2), dims=(32, 16), batch=2):
    """q, k and v, of which gradients are asked for."""
    shapes = (seqlen_q, heads[0], dims[0]), (seqlen_k, heads[1], dims[0]), (seqlen_k, heads[1], dims[1])
    tensors = [paddle.randn([batch, *shape]).astype(dtype) for shape in shapes]
    for x in tensors:
        x.stop_gradient = False
    return tensors


def indices(seqlen_q, seqlen_k, vectors, heads=1, batch=2):
    return paddle.randint(-3, seqlen_q + 4, [batch, heads, seqlen_k, vectors], dtype="int32")


def assert_close(got, want, dtype):
    assert got.dtype == getattr(paddle, dtype) and got.shape == want.shape
    got, want = (x.astype("float64").numpy() for x in (got, want))
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite])
    error = np.abs(got[finite] - want[finite]).max(initial=0)
    assert error <= TOLERANCES[dtype] * np.abs(want[finite]).max(initial=1e-30), error


def check(tensors, visible, *mask, scale=None, kept=1, **arguments):
    """Out, lse and the gradients of both, under a weight for each element."""
    dtype = str(tensors[0].dtype).removeprefix("paddle.")
    given = {**arguments} if scale is None else {**arguments, "softmax_scale": scale}
    out, lse = flashmask_attention(*tensors, *mask, return_softmax_lse=True, **given)
    want_out, want_lse = dense.attention(*tensors, visible, scale, kept)
    assert_close(out, want_out, dtype)
    assert_close(lse, want_lse, "float32")
    dout, dlse = paddle.randn(out.shape).astype(dtype), paddle.randn(lse.shape)

    def loss(out, lse):
        lse = paddle.where(paddle.isfinite(want_lse), lse.astype("float64"), paddle.zeros_like(want_lse))
        return (out.astype("float64") * dout.astype("float64")).sum() + (lse * dlse.astype("float64")).sum()

    got = paddle.grad(loss(out, lse), tensors)
    for gradient, want in zip(got, paddle.grad(loss(want_out, want_lse), tensors)):
        assert_close(gradient, want, dtype)


# --- Results ------------------------------------------------------------------------------------------


def test_the_signature_is_paddles():
    def parameters(function):
        return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]

    wanted = parameters(paddle.nn.functional.flashmask_attention)
    assert parameters(flashmask_attention) == parameters(fm.explain) == wanted


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("causal, vectors", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_vector_forms_and_dtypes(causal, vectors, dtype):
    mask = indices(150, 150, vectors)
    check(draw(dtype=dtype), dense.visible(150, 150, mask, causal), mask, causal=causal)


@pytest.mark.parametrize("heads, heads_kv", [(1, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 4), (4, 4)])
def test_heads_of_the_mask_and_of_the_keys(heads, heads_kv):
    mask = indices(150, 150, 1, heads)
    check(draw(heads=(4, heads_kv)), dense.visible(150, 150, mask, True), mask, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(150, 150), (90, 150), (150, 90), (0, 5), (5, 0)])
def test_no_mask_and_lengths_that_differ(seqlen_q, seqlen_k, causal):
    check(draw(seqlen_q, seqlen_k), dense.visible(seqlen_q, seqlen_k, causal=causal), causal=causal)
    if seqlen_q and seqlen_k:
        mask = indices(seqlen_q, seqlen_k, 2)
        check(draw(seqlen_q, seqlen_k), dense.visible(seqlen_q, seqlen_k, mask, causal), mask, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 20, (30, 7), [7, 30], (1000, 0)])
def test_window(window, causal):
    pair = (window, window) if isinstance(window, int) else window
    check(draw(), dense.visible(150, 150, causal=causal, window=pair), causal=causal, window_size=window)


def test_window_is_what_paddle_makes_of_it():
    """Paddle's function writes LTS = key + left + 1 and UTE = key - right for a window."""
    key, (left, right) = paddle.arange(150, dtype="int32"), (30, 7)
    both = paddle.stack([(key + left + 1).clip(max=150), (key - right).clip(min=0)], -1)[None, None]
    tensors = draw()
    for causal, mask in ((False, both), (True, both[..., :1])):
        out = flashmask_attention(*tensors, causal=causal, window_size=(left, right))
        assert np.array_equal(out.numpy(), flashmask_attention(*tensors, mask, causal=causal).numpy())


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
@pytest.mark.parametrize("heads", [1, 2])
def test_block_mask(heads, dtype):
    keep = paddle.randint(0, 2, [2, heads, 3, 3], dtype="int32")
    keep[:, :, :, 0] = 1
    mask = indices(300, 300, 1, heads)
    seen = dense.visible(300, 300, mask, True, block_mask=keep)
    check(draw(300, 300), seen, mask, causal=True, block_mask=keep.astype(dtype))
    alone = dense.visible(300, 300, block_mask=keep)
    check(draw(300, 300), alone, block_mask=keep.astype(dtype))


def test_softmax_scale():
    check(draw(), dense.visible(150, 150, causal=True), causal=True, scale=0.3)


def test_what_is_returned():
    tensors = draw()
    out = flashmask_attention(*tensors)
    assert isinstance(out, paddle.Tensor) and out.shape == [2, 150, 4, 16] and not out.stop_gradient
    both = flashmask_attention(*tensors, return_softmax_lse=True)
    assert type(both) is list and both[1].shape == [2, 4, 150] and both[1].dtype == paddle.float32
    with paddle.no_grad():
        assert flashmask_attention(*tensors).stop_gradient


# --- Dropout ------------------------------------------------------------------------------------------


def state_of(seed, offset):
    return paddle.to_tensor([seed, offset], dtype="int64")


def kept_of(state, p, *shape):
    """Dropout's factors of the weights, float64."""
    return fm.dropout_mask(state, p, *shape).astype("float64") * (65536 / (65536 - round(p * 65536)))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("p", [0.125, 0.7])
def test_dropout(dtype, p):
    state, mask = state_of(2**62 + 7, 12), indices(150, 150, 1)
    seen = dense.visible(150, 150, mask, True)
    given = {"causal": True, "dropout": p, "fixed_seed_offset": state}
    check(draw(dtype=dtype), seen, mask, kept=kept_of(state, p, 2, 4, 150, 150), **given)


def test_dropout_mask_is_that_of_numpys_front():
    of_numpy = pytest.importorskip("flashmask.numpy").dropout_mask(np.array([5, 6]), 0.3, 2, 3, 40, 50)
    assert np.array_equal(fm.dropout_mask(state_of(5, 6), 0.3, 2, 3, 40, 50).numpy(), of_numpy)
    assert 0.6 < of_numpy.mean() < 0.8


def test_the_state_is_drawn_from_paddles_generator():
    tensors, p = draw(), 0.4
    paddle.seed(3)
    first, state = flashmask_attention(*tensors, dropout=p, return_seed_offset=True)
    second, other = flashmask_attention(*tensors, dropout=p, return_seed_offset=True)
    assert state.dtype == paddle.int64 and state.shape == [2] and state.stop_gradient
    assert not np.array_equal(state.numpy(), other.numpy()) and not np.array_equal(first.numpy(), second.numpy())
    paddle.seed(3)
    again = flashmask_attention(*tensors, dropout=p)
    assert np.array_equal(again.numpy(), first.numpy())
    fixed = flashmask_attention(*tensors, dropout=p, fixed_seed_offset=other)
    assert np.array_equal(fixed.numpy(), second.numpy())
    want, _ = dense.attention(*tensors, dense.visible(150, 150), kept=kept_of(state, p, 2, 4, 150, 150))
    assert_close(first, want, "float32")


def test_a_generator_by_name():
    tensors, core = draw(), paddle.base.core
    core.set_random_seed_generator("of flashmask's test", 7)
    twin = core.Generator()
    twin.manual_seed(7)
    for _ in range(2):
        _, state = flashmask_attention(*tensors, rng_name="of flashmask's test", dropout=0.1, return_seed_offset=True)
        assert state.tolist() == [twin.random() >> 1, twin.random() >> 1]


def test_a_state_of_fleets_tracker():
    tensors, tracker = draw(), get_rng_state_tracker()
    tracker.add("of flashmask's test", 11)
    states = []
    for _ in range(2):
        with tracker.rng_state("of flashmask's test"):
            states.append(flashmask_attention(*tensors, dropout=0.1, return_seed_offset=True)[1].tolist())
    paddle.seed(11)
    assert states == [paddle.empty([2], dtype="int64").random_().tolist() for _ in range(2)]


def test_what_is_returned_with_a_state():
    tensors, state = draw(), state_of(3, 4)
    out, lse, got = flashmask_attention(
        *tensors, dropout=0.2, return_softmax_lse=True, return_seed_offset=True, fixed_seed_offset=state
    )
    assert out.shape == [2, 150, 4, 16] and lse.shape == [2, 4, 150] and got.tolist() == [3, 4]
    for arguments in ({}, {"dropout": 0.5, "training": False}):
        plain, drawn = flashmask_attention(*tensors, return_seed_offset=True, **arguments)
        assert np.array_equal(plain.numpy(), flashmask_attention(*tensors).numpy()) and drawn.shape == [2]


@pytest.mark.parametrize("draws", [False, True])
def test_without_dropout_nothing_is_drawn(draws):
    tensors = draw()

    def next_number(*calls):
        paddle.seed(3)
        for call in calls:
            call()
        return float(paddle.rand([1]))

    calls = (
        lambda: flashmask_attention(*tensors, dropout=0.5 if draws else 0.0),
        lambda: fm.explain(*tensors, dropout=0.5),
    )
    assert (next_number(*calls) != next_number()) == draws


def test_recomputing_drops_the_same():
    tensors = draw()
    attend = lambda *x: flashmask_attention(*x, causal=True, dropout=0.5)  # noqa: E731
    paddle.seed(1)
    want = paddle.grad(attend(*tensors).sum(), tensors)
    paddle.seed(1)
    recompute(attend, *tensors).sum().backward()
    for x, gradient in zip(tensors, want):
        assert np.array_equal(x.grad.numpy(), gradient.numpy())


# --- Memory and autograd ------------------------------------------------------------------------------


def test_views_are_read_in_place(monkeypatch):
    packed = paddle.randn([2, 150, 3, 4, 32])
    packed.stop_gradient = False
    q, k, v = packed.unbind(2)
    transposed = [x.transpose([0, 2, 1, 3]).contiguous().transpose([0, 2, 1, 3]) for x in (q, k, v)]
    assert not q.is_contiguous() and not transposed[0].is_contiguous()
    seen = []
    run = ctypes_calls._run
    monkeypatch.setattr(ctypes_calls, "_run", lambda *arguments: (seen.append(arguments[3]), run(*arguments)))
    outs = [flashmask_attention(*tensors, causal=True) for tensors in ((q, k, v), transposed)]
    assert [x["q"].data_ptr() for x in seen] == [q.data_ptr(), transposed[0].data_ptr()]
    assert np.array_equal(outs[0].numpy(), outs[1].numpy())
    want, _ = dense.attention(q, k, v, dense.visible(150, 150, causal=True))
    dout = paddle.randn([2, 4, 150, 32]).transpose([0, 2, 1, 3])
    (got,), (want,) = (paddle.grad((x * dout.astype(x.dtype)).sum(), packed) for x in (outs[0], want))
    assert_close(got, want.astype("float64"), "float32")


@pytest.mark.parametrize("strides", [[0, 128, 32, 1], [5120, 0, 32, 1], [5120, 128, 0, 1], [0, 0, 0, 1]])
def test_broadcast_inputs(strides):
    tensors = [paddle.as_strided(paddle.randn([2 * 40 * 4 * 32]), [2, 40, 4, 32], strides) for _ in range(3)]
    ends = paddle.as_strided(paddle.full([1], 30, dtype="int32"), [2, 4, 40, 1], [0, 0, 0, 1])
    assert not tensors[0].is_contiguous() and not ends.is_contiguous()
    dense_tensors = [x.contiguous() for x in tensors]
    for x in (*tensors, *dense_tensors):
        x.stop_gradient = False
    visible = dense.visible(40, 40, ends.contiguous(), causal=True)
    check(dense_tensors, visible, ends, causal=True)
    got, want = (flashmask_attention(*x, ends, causal=True) for x in (tensors, dense_tensors))
    assert np.array_equal(got.numpy(), want.numpy())
    for a, b in zip(paddle.grad(got.sum(), tensors), paddle.grad(want.sum(), dense_tensors)):
        assert np.array_equal(a.numpy(), b.numpy())


def test_tensors_without_a_gradient():
    q, k, v = draw()
    k.stop_gradient = True
    flashmask_attention(q, k, v).sum().backward()
    assert k.grad is None and q.grad.shape == q.shape and v.grad.shape == v.shape


def test_gradient_of_lse_alone():
    q, k, v = draw()
    _, lse = flashmask_attention(q, k, v, return_softmax_lse=True)
    _, want = dense.attention(q, k, v, dense.visible(150, 150))
    got = paddle.grad(lse.sum(), [q, k, v])
    for gradient, wanted in zip(got, paddle.grad(want.sum(), [q, k])):
        assert_close(gradient, wanted, "float32")
    assert not got[2].any()


def test_gradients_of_some_are_an_error_of_paddles():
    """Its PyLayer does not tell the backward which ones paddle.grad asks for."""
    q, k, v = draw()
    with pytest.raises(ValueError, match="should return None at 1 position"):
        paddle.grad(flashmask_attention(q, k, v).sum(), q)


def test_recomputing_gives_the_same_gradients():
    tensors = draw()
    attend = lambda *x: flashmask_attention(*x, causal=True)  # noqa: E731
    want = paddle.grad(attend(*tensors).sum(), tensors)
    recompute(attend, *tensors).sum().backward()
    for x, gradient in zip(tensors, want):
        assert np.array_equal(x.grad.numpy(), gradient.numpy())


@pytest.mark.parametrize("changed", ["query", "startend_row_indices", "block_mask", "fixed_seed_offset"])
def test_a_change_in_place_is_noticed(changed):
    q, k, v = (x * 1 for x in draw())
    given = {
        "startend_row_indices": indices(150, 150, 1),
        "block_mask": paddle.ones([1, 1, 2, 2], dtype="int32"),
        "fixed_seed_offset": state_of(1, 2),
    }
    out = flashmask_attention(q, k, v, **given, causal=True, dropout=0.5)
    with paddle.no_grad():
        {"query": q, **given}[changed].fill_(1)
    with pytest.raises(OSError, match="RuntimeError: a tensor .* was changed in place before the backward"):
        out.sum().backward()


def test_second_derivatives_are_refused():
    q, k, v = draw()
    with pytest.raises(OSError, match="UnsupportedError: second derivatives of"):  # as Paddle passes on what is raised
        paddle.grad(flashmask_attention(q, k, v).sum(), [q, k, v], create_graph=True)


# --- What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"name": "attention"}, "name is 'attention'"),
        ({"query": paddle.zeros([1, 8, 2, 8], "float64"), "key": paddle.zeros([1, 8, 2, 8], "float64"),
          "value": paddle.zeros([1, 8, 2, 8], "float64")}, "float64"),
    ],
)  # fmt: skip
def test_what_is_not_implemented_is_named(change, words):
    given = {name: paddle.zeros([1, 8, 2, 8]) for name in ("query", "key", "value")} | change
    with pytest.raises(fm.UnsupportedError, match=words):
        flashmask_attention(**given)
    assert "refused" in fm.explain(**given)


def zeros(*shape, dtype="int32"):
    return paddle.zeros(shape, dtype)


@pytest.mark.parametrize(
    "change, raised, words",
    [
        ({"query": np.zeros((1, 8, 2, 8))}, TypeError, "query is a numpy.ndarray.* be a paddle.Tensor"),
        ({"key": paddle.zeros([8, 8])}, ValueError, r"key has shape \[8, 8\]; it must have 4 dimensions"),
        ({"key": paddle.zeros([1, 8, 2, 4])}, ValueError, r"k is float32 \[1, 8, 2, 4\]"),
        ({"key": paddle.zeros([1, 8, 2, 8], "float16")}, ValueError, "float16"),
        ({"query": paddle.zeros([1, 8, 2, 16])[..., ::2]}, ValueError, "contiguous"),
        ({"startend_row_indices": [1]}, TypeError, "startend_row_indices is"),
        ({"startend_row_indices": zeros(1, 1, 8, 1, dtype="int64"), "causal": True}, ValueError, "indices is int64"),
        ({"startend_row_indices": zeros(1, 1, 8, 1)}, ValueError, "1 vectors? and causal is false"),
        ({"startend_row_indices": zeros(1, 1, 8, 4), "causal": True}, ValueError, "4 vectors and causal is true"),
        ({"startend_row_indices": zeros(1, 1, 7, 2)}, ValueError, "indices is int32 .* must be seqlen_k, 8"),
        ({"startend_row_indices": zeros(3, 1, 8, 2)}, ValueError, "3"),
        ({"startend_row_indices": zeros(1, 3, 8, 2)}, ValueError, "3"),
        ({"block_mask": zeros(1, 1, 2, 1)}, ValueError, r"block_mask is int32 \[1, 1, 2, 1\]"),
        ({"window_size": -1}, ValueError, "window_size is -1; it must be at least 0"),
        ({"window_size": (3, None)}, TypeError, "window_size is None"),
        ({"window_size": (3, 4, 5)}, ValueError, "window_size has 3 entries"),
        ({"window_size": 3, "key": paddle.zeros([1, 9, 2, 8]), "value": paddle.zeros([1, 9, 2, 8])}, ValueError,
         "window_size is 3, and there are 8 query rows and 9 keys"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale"),
        ({"causal": 2}, TypeError, "causal is 2"),
        ({"training": None}, TypeError, "training is None"),
        ({"dropout": 1}, ValueError, "dropout is 1.0; it must be at least 0 and less than 1"),
        ({"dropout": "0.1"}, TypeError, "dropout is '0.1'"),
        ({"return_seed_offset": None}, TypeError, "return_seed_offset is None"),
        ({"fixed_seed_offset": (1, 2)}, TypeError, r"fixed_seed_offset is \(1, 2\) .* be a paddle.Tensor"),
        ({"fixed_seed_offset": zeros(2)}, ValueError, r"fixed_seed_offset is .*int32 \[2\]; it must be int64 \[2\]"),
        ({"fixed_seed_offset": zeros(3, dtype="int64")}, ValueError, r"fixed_seed_offset is .*int64 \[3\]"),
        ({"rng_name": None}, TypeError, "rng_name is None"),
        ({"rng_name": "nobody"}, ValueError, "rng_name is 'nobody'; Paddle has no generator of that name"),
        ({"return_softmax_lse": "yes"}, TypeError, "return_softmax_lse is 'yes'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change, raised, words):
    given = {name: paddle.zeros([1, 8, 2, 8]) for name in ("query", "key", "value")} | change
    with pytest.raises(raised, match=words):
        flashmask_attention(**given)


def test_static_mode_is_refused():
    tensors = draw()
    paddle.enable_static()
    try:
        with pytest.raises(fm.UnsupportedError, match="static mode"):
            flashmask_attention(*tensors)
    finally:
        paddle.disable_static()


# --- explain and import -------------------------------------------------------------------------------


def test_explain_says_what_runs():
    q, k, v = draw(300, 300, dims=(64, 64))
    text = fm.explain(q, k, v, indices(300, 300, 1), causal=True)
    for line in (
        "query     [2, 300, 4, 64] float32 on cpu",
        "mask      causal; LTS of each key, batch 2, heads 1; row 0 at key 0",
        "tiles     18 of 128x128: ",
        "forward   backend: cpu",
        "backward  backend: cpu",
    ):
        assert line in text, text
    with paddle.no_grad():
        assert "backward  not needed" in fm.explain(q.detach(), k.detach(), v.detach())
    wide = [x.astype("float64") for x in (q, k, v)]
    assert fm.explain(*wide).endswith("nearest   cast query, key and value to float32")


def test_import_needs_no_other_front():
    program = """
import sys
for name in ("torch", "jax"):
    sys.modules[name] = None  # cannot be imported
import flashmask.paddle, paddle
assert not [line for line in open("/proc/self/maps") if "libflashmask" in line]
q = paddle.ones([1, 5, 1, 8])
assert bool((flashmask.paddle.flashmask_attention(q, q, q, causal=True) == 1).all())
print(*sorted(name for name in sys.modules if name.startswith("flashmask")))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert not {"flashmask.torch", "flashmask.numpy", "flashmask.jax"} & set(ran.stdout.split())


def test_without_paddle_it_says_so():
    program = "import sys; sys.modules['paddle'] = None; import flashmask.paddle"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ImportError: flashmask.paddle needs PaddlePaddle" in ran.stderr
