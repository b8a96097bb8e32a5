# SPDX-License-Identifier: Apache-2.0
"""Features beyond the softmax of masked scores, against a dense float64 attention, through every frontend."""

import dense_reference
import flashmask
import pytest
import torch
import torch.utils.checkpoint
from dense_reference import assert_close
from devices import DEVICE, DTYPE, ON_CUDA, cpu_only, tolerance_of
from flashmask import flashmask_attention, masks, merge_attention
from flashmask.torch import operators, ops

S, HEADS = 150, 4
DTYPES = [torch.bfloat16, torch.float16] + ([] if ON_CUDA else [torch.float32])
FEATURES = {
    "sink": lambda dtype: {"sink": torch.randn(HEADS)},
    "sink of the tensors' dtype": lambda dtype: {"sink": torch.randn(HEADS).to(dtype)},
    "softcap": lambda dtype: {"softcap": 2.0},
    "dropout": lambda dtype: {"dropout": 0.3, "dropout_state": torch.tensor([5, -6])},
    "ALiBi": lambda dtype: {"alibi_slopes": torch.rand(HEADS)},
    "all": lambda dtype: {
        "softcap": 20.0,
        "alibi_slopes": torch.rand(HEADS),
        "sink": torch.randn(HEADS),
        "dropout": 0.1,
        "dropout_state": torch.tensor([2**62, 3]),
    },
}
every_feature = pytest.mark.parametrize("feature", FEATURES)


@pytest.fixture(autouse=True)
def on_the_device():
    with torch.device(DEVICE):
        yield


def tensors(dtype=DTYPE, batch=2, seqlen=S):
    shapes = ((batch, seqlen, HEADS, 16), (batch, seqlen, 2, 16), (batch, seqlen, 2, 8))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def tensors_on(device):
    with torch.device(device):
        return tensors()


def mask_with_blind_rows():
    """Rows from 120 on are padding and see nothing."""
    return masks.padding(S, S, [100, 120], query_lengths=[100, 120])


def results(function, leaves, dout, dlse):
    """out, lse, and the gradients that reach the leaves."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out, lse = function(*leaves)
    return (out, lse, *torch.autograd.grad(dense_reference.loss_of(out, lse, dout, dlse), leaves))


def compare(call, want, leaves, tolerance=None):
    """Two functions of q, k, v and perhaps a sink: (out, lse) BSHD, and gradients through both."""
    q, _, v = leaves[:3]
    dout = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64)
    got = results(call, leaves, dout, dlse)
    exact = results(want, [x.double() for x in leaves], dout, dlse)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsink"), got, exact):
        assert_close(x, y, name, tolerance or tolerance_of(name, q.dtype))
    return got


def kept_weights(state, p, batch, rows, keys):
    """Dropout's factor of each weight."""
    return flashmask.dropout_mask(state, p, batch, HEADS, rows, keys) * (65536 / (65536 - round(p * 65536)))


def dense(visible, softcap=0.0, dropout=0.0, dropout_state=None, **alibi):
    def function(q, k, v, sink=None):
        weights = kept_weights(dropout_state, dropout, len(q), q.shape[1], k.shape[1]) if dropout else None
        out, lse = dense_reference.attention(
            *(x.transpose(1, 2) for x in (q, k, v)), visible, softcap=softcap, sink=sink, weights=weights, **alibi
        )
        return out.transpose(1, 2), lse

    return function


def split(features):
    """(the sink in a list, if there is one; the rest)."""
    rest = dict(features)
    sink = rest.pop("sink", None)
    return ([] if sink is None else [sink]), rest


@every_feature
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [lambda: masks.causal(S), mask_with_blind_rows])
def test_against_a_dense_attention(feature, dtype, mask):
    sink, rest = split(FEATURES[feature](dtype))
    mask = mask()

    def call(q, k, v, sink=None):
        return flashmask_attention(q, k, v, mask, sink=sink, return_softmax_lse=True, **rest)

    got = compare(call, dense(mask.to_dense(), **rest), [*tensors(dtype), *sink])
    assert not sink or got[-1].dtype == sink[0].dtype


def test_a_row_that_sees_nothing_has_the_sink_for_lse():
    sink = torch.randn(HEADS)
    out, lse = flashmask_attention(*tensors(), mask_with_blind_rows(), sink=sink, return_softmax_lse=True)
    assert not out[1, 120:].any() and torch.equal(lse[1, :, 120:], sink[:, None].expand(HEADS, S - 120))


def test_paddles_arguments_of_dropout():
    q, k, v = tensors()
    torch.manual_seed(3)
    out, state = flashmask_attention(q, k, v, dropout=0.3, return_seed_offset=True)
    torch.manual_seed(3)
    assert torch.equal(flashmask_attention(q, k, v, dropout=0.3), out)
    for name in ("fixed_seed_offset", "dropout_state"):
        again, lse, same = flashmask_attention(
            q, k, v, dropout=0.3, return_softmax_lse=True, return_seed_offset=True, **{name: state}
        )
        assert torch.equal(again, out) and lse.shape == (2, HEADS, S) and torch.equal(same, state)
    plain = flashmask_attention(q, k, v)
    assert torch.equal(flashmask_attention(q, k, v, dropout=0.3, training=False), plain)
    assert not torch.equal(plain, out)
    compiled = torch.compile(flashmask_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, dropout=0.3, fixed_seed_offset=state), out)
    traced, drawn = compiled(q, k, v, dropout=0.3, return_seed_offset=True)
    assert torch.equal(flashmask_attention(q, k, v, dropout=0.3, fixed_seed_offset=drawn), traced)


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ({"rng_name": "local_seed"}, flashmask.UnsupportedError, "rng_name is 'local_seed'"),
        ({"fixed_seed_offset": torch.zeros(3, dtype=torch.int64)}, ValueError, "fixed_seed_offset is a tensor"),
        ({"fixed_seed_offset": [1, 2]}, TypeError, r"fixed_seed_offset is \[1, 2\]"),
        ({"training": None}, TypeError, "training is None"),
        ({"return_seed_offset": "yes"}, TypeError, "return_seed_offset is 'yes'"),
        (
            dict.fromkeys(("fixed_seed_offset", "dropout_state"), torch.tensor([1, 2])),
            ValueError,
            "beside dropout_state",
        ),
    ],
)
def test_wrong_arguments_of_paddles_are_named(arguments, error, says):
    with pytest.raises(error, match=says):
        flashmask_attention(*tensors(), dropout=0.5, **arguments)
    if "return_seed_offset" not in arguments:
        assert flashmask.explain(*tensors(), dropout=0.5, **arguments).startswith("refused")


@cpu_only("float64")
@every_feature
def test_gradcheck(feature):
    """Checks gradients in float64, by the reference backend."""
    sink, rest = split(FEATURES[feature](torch.float64))
    leaves = [x.requires_grad_() for x in (*tensors(torch.float64, 1, 5), *(x.double() for x in sink))]

    def call(q, k, v, sink=None):
        return flashmask_attention(
            q, k, v, causal=True, sink=sink, backend="reference", return_softmax_lse=True, **rest
        )

    assert torch.autograd.gradcheck(call, leaves)


@every_feature
def test_opcheck(feature):
    sink, rest = split(FEATURES[feature](DTYPE))
    rest["dropout_p"] = rest.pop("dropout", 0.0)  # as the operators call it
    options = {"sink": sink[0].requires_grad_()} if sink else {}
    options |= rest
    q, k, v = (x.requires_grad_() for x in tensors(seqlen=70))
    plain = (None, None, None, None, True, None, -1, -1, True, "auto")
    torch.library.opcheck(torch.ops.flashmask.forward.default, (q, k, v, *plain), options)
    with torch.no_grad():
        out, lse = torch.ops.flashmask.forward(q, k, v, *plain, **options)
        arguments = (torch.randn_like(out), None, q, k, v, out, lse, *plain)
        torch.library.opcheck(torch.ops.flashmask.backward.default, arguments, options)


@every_feature
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled(feature, dynamic):
    sink, rest = split(FEATURES[feature](DTYPE))

    def call(q, k, v, sink=None):
        return flashmask_attention(q, k, v, causal=True, sink=sink, return_softmax_lse=True, **rest)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    leaves = [*tensors(), *sink]
    dout, dlse = torch.randn(2, S, HEADS, 8), torch.randn(2, HEADS, S)
    torch.manual_seed(3)
    got = results(compiled, leaves, dout, dlse)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(got, results(call, leaves, dout, dlse), strict=True))


@every_feature
def test_layouts_autocast_and_the_operators_front(feature):
    sink, rest = split(FEATURES[feature](DTYPE))
    features = {"sink": sink[0], **rest} if sink else rest
    q, k, v = tensors()
    out = flashmask_attention(q, k, v, causal=True, **features)
    bhsd = flashmask_attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bhsd", **features)
    assert torch.equal(bhsd.transpose(1, 2), out)
    by_operator, _ = flashmask.ops.attention(q, k, v, masks.causal(S), **features)
    assert torch.equal(by_operator, out)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cast = flashmask_attention(q, k, v, causal=True, **features)
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(cast, flashmask_attention(*low, causal=True, **features))


@every_feature
def test_varlen(feature):
    rename = {"dropout": "dropout_p"}
    sink, rest = split(FEATURES[feature](DTYPE))
    features = {"sink": sink[0], **rest} if sink else rest
    q, k, v = (x[0] for x in tensors(batch=1))
    out, lse = flashmask.flashmask_varlen_func(
        q,
        k,
        v,
        [0, 60, 60, S],
        [0, 60, 60, S],
        causal=True,
        return_softmax_lse=True,
        **{rename.get(name, name): x for name, x in features.items()},
    )
    packed = flashmask_attention(q[None], k[None], v[None], masks.causal_document(seqlens=[60, 0, S - 60]), **features)
    assert torch.equal(out, packed[0])
    for begin, end in ((0, 60), (60, S)):
        part = [x[None, begin:end] for x in (q, k, v)]
        own, own_lse = flashmask_attention(*part, causal=True, return_softmax_lse=True, **features)
        if "dropout" not in rest:  # dropout goes by the rows and keys of the packed batch
            assert_close(out[begin:end], own[0], tolerance=tolerance_of("out", out.dtype))
        assert_close(lse[:, begin:end], own_lse[0], tolerance=tolerance_of("lse", out.dtype))


def test_explain_names_them_and_who_takes_them():
    q, k, v = tensors()
    before = torch.get_rng_state()
    text = flashmask.explain(q, k, v, softcap=30.0, sink=torch.zeros(HEADS, requires_grad=True), dropout=0.1)
    assert torch.equal(torch.get_rng_state(), before)
    for part in (
        f"forward   backend: {DEVICE.type}",
        f"backward  backend: {DEVICE.type}",
        "with softcap",
        "with sink",
        "with dropout",
    ):
        assert part in text
    assert "backward  not needed" in flashmask.explain(q, k, v, softcap=30.0)
    text = flashmask.explain(*(x.double() for x in (q, k, v)), softcap=30.0)
    assert "float64 is taken by backend 'reference' only" in text or ON_CUDA


def test_a_sink_alone_has_a_gradient():
    q, k, v = tensors()
    sink = torch.randn(HEADS, requires_grad=True)
    (alone,) = torch.autograd.grad(flashmask_attention(q, k, v, sink=sink).sum(), sink)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    *_, beside = torch.autograd.grad(flashmask_attention(*leaves, sink=sink).sum(), (*leaves, sink))
    assert torch.equal(alone, beside) and alone.abs().min() > 0


def test_vmap_takes_a_shared_sink_only():
    q, k, v = (torch.stack((x, 2 * x)) for x in tensors())
    sink = torch.randn(HEADS)
    call = lambda q, k, v, sink: flashmask_attention(q, k, v, sink=sink, softcap=3.0)
    got = torch.func.vmap(call, in_dims=(0, 0, 0, None))(q, k, v, sink)
    assert torch.equal(got[1], call(q[1], k[1], v[1], sink))
    with pytest.raises(NotImplementedError, match="vmap over a sink"):
        torch.func.vmap(call)(q, k, v, torch.stack((sink, sink)))


def test_derivatives_that_are_not_there():
    q, k, v = tensors()
    sink = torch.randn(HEADS)
    call = lambda sink: flashmask_attention(q, k, v, sink=sink).sum()
    with pytest.raises(flashmask.UnsupportedError, match="torch.func cannot differentiate"):
        torch.func.grad(call)(sink)
    with pytest.raises(flashmask.UnsupportedError, match="forward mode"):
        with torch.autograd.forward_ad.dual_level():
            call(torch.autograd.forward_ad.make_dual(sink, sink))


# --- ALiBi --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_alibi_by_batch_entry_with_lengths_that_differ(dtype, softcap):
    """Rows end at the last key; slopes may be negative."""
    q, k, v = tensors(dtype)
    q = q[:, :70]
    slopes = torch.rand(2, HEADS) - 0.3
    mask = masks.causal(70, S)
    call = lambda q, k, v: flashmask_attention(
        q, k, v, mask, alibi_slopes=slopes, softcap=softcap, return_softmax_lse=True
    )
    compare(call, dense(mask.to_dense(), softcap, alibi_slopes=slopes), [q, k, v])


@pytest.mark.parametrize("q_offset", [0, -40, 33])
def test_alibi_takes_the_masks_q_offset(q_offset):
    slopes, row, key = torch.rand(HEADS), torch.arange(S)[:, None] + q_offset, torch.arange(S)
    call = lambda q, k, v: flashmask_attention(
        q, k, v, causal=True, q_offset=q_offset, alibi_slopes=slopes, return_softmax_lse=True
    )
    compare(call, dense(key <= row, alibi_slopes=slopes, distances=(row - key).abs()), tensors())


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_takes_the_masks_positions(causal):
    slopes = torch.rand(HEADS)
    row, key = (torch.randint(-50, 50, (S,), dtype=torch.int32) for _ in range(2))
    given = {"q_pos": row[None], "k_pos": key[None], "causal": causal}
    call = lambda q, k, v: flashmask_attention(q, k, v, alibi_slopes=slopes, return_softmax_lse=True, **given)
    visible = (key <= row[:, None]) | (not causal)
    compare(call, dense(visible, alibi_slopes=slopes, distances=(row[:, None] - key).abs()), tensors())


def test_alibi_of_documents_whose_lengths_differ():
    slopes, lengths = torch.rand(HEADS), [(60, 20), (0, 7), (30, 90)]
    rows, keys = (sum(x) for x in zip(*lengths))
    q, k, v = (x[0] for x in tensors(batch=1))
    q, k, v = q[:rows], k[:keys], v[:keys]
    out = flashmask.flashmask_varlen_func(q, k, v, [0, 60, 60, 90], [0, 20, 27, 117], alibi_slopes=slopes)
    for q_d, k_d, v_d in zip(*(x.split(n) for x, n in zip((q, k, v), (*zip(*lengths), list(zip(*lengths))[1])))):
        own = flashmask_attention(q_d[None], k_d[None], v_d[None], alibi_slopes=slopes)
        assert_close(out[: len(q_d)], own[0], tolerance=tolerance_of("out", out.dtype))
        out = out[len(q_d) :]
    with pytest.raises(ValueError, match="alibi_slopes is float32"):
        flashmask.flashmask_varlen_func(q, k, v, [0, 60, 90], [0, 20, 117], alibi_slopes=torch.rand(2, HEADS))


def test_a_scale_of_zero_leaves_the_biases():
    slopes, q, k, v = torch.rand(HEADS), *tensors()
    got = flashmask_attention(q, k, v, softmax_scale=0.0, alibi_slopes=slopes)
    want, _ = dense(torch.ones(S, S, dtype=torch.bool), alibi_slopes=slopes)(torch.zeros_like(q), k, v)
    assert_close(got, want, tolerance=tolerance_of("out", got.dtype))


def test_slopes_that_require_a_gradient_are_refused():
    slopes = torch.rand(HEADS, requires_grad=True)
    with pytest.raises(flashmask.UnsupportedError, match="alibi_slopes requires a gradient"):
        flashmask_attention(*tensors(), alibi_slopes=slopes)
    with torch.no_grad():
        flashmask_attention(*tensors(), alibi_slopes=slopes.detach())


@pytest.mark.parametrize("shape", [(HEADS,), (2, HEADS)])
def test_vmap_takes_shared_slopes(shape):
    q, k, v = (torch.stack((x, 2 * x)) for x in tensors())
    slopes = torch.rand(shape)
    call = lambda q, k, v: flashmask_attention(q, k, v, alibi_slopes=slopes)
    got = torch.func.vmap(call)(q, k, v)
    assert torch.equal(got[1], call(q[1], k[1], v[1]))


# --- Dropout ------------------------------------------------------------------------------------------------


def test_a_state_is_drawn_from_the_default_generator():
    q, k, v = tensors()
    torch.manual_seed(7)
    first, second = (flashmask_attention(q, k, v, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    state = torch.randint(2**63 - 1, (2,))
    assert torch.equal(flashmask_attention(q, k, v, dropout=0.5, dropout_state=state), first)
    assert torch.equal(flashmask_attention(q, k, v, dropout=0.5), second)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_drawn_state_is_the_backwards_too(compiled):
    """Gradients of a call that drew are those of the pattern that it drew."""
    call = lambda q, k, v: flashmask_attention(q, k, v, causal=True, dropout=0.4, return_softmax_lse=True)
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(11)
    state = torch.randint(2**63 - 1, (2,))
    torch.manual_seed(11)
    q, k, v = tensors()
    dout, dlse = torch.randn(2, S, HEADS, 8), torch.zeros(2, HEADS, S)
    torch.manual_seed(11)
    got = results(call, (q, k, v), dout, dlse)
    want = dense(masks.causal(S).to_dense(), dropout=0.4, dropout_state=state)
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, results(want, (q, k, v), dout, dlse)):
        assert_close(x, y, name, tolerance_of(name, DTYPE))


def test_checkpoints_draw_the_same_again():
    def call(q, k, v):
        return flashmask_attention(q, k, v, causal=True, dropout=0.4)

    gradients = []
    for wrapped in (call, lambda *x: torch.utils.checkpoint.checkpoint(call, *x, use_reentrant=False)):
        torch.manual_seed(5)
        leaves = [x.requires_grad_() for x in tensors()]
        gradients.append(torch.autograd.grad(wrapped(*leaves).square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_the_mask_of_a_state():
    state = torch.tensor([123, 456])
    kept = flashmask.dropout_mask(state, 0.25, 2, 3, 70, 50)
    assert kept.dtype == torch.bool and kept.shape == (2, 3, 70, 50)
    assert torch.equal(flashmask.dropout_mask(state, 0.25, 1, 2, 33, 17), kept[:1, :2, :33, :17])
    assert not torch.equal(flashmask.dropout_mask(state + 1, 0.25, 2, 3, 70, 50), kept)
    assert 0.7 < kept.double().mean() < 0.8
    assert flashmask.dropout_mask(state, 0.0, 1, 1, 4, 4).all()
    for change, error, text in (
        ({"state": [1, 2]}, TypeError, "state is"),
        ({"state": torch.zeros(2)}, ValueError, r"it must be int64 \[2\]"),
        ({"state": torch.zeros(3, dtype=torch.int64)}, ValueError, r"it must be int64 \[2\]"),
        ({"p": 1.0}, ValueError, "p is 1.0; it must be at least 0 and less than 1"),
        ({"p": None}, TypeError, "p is None"),
        ({"heads": -1}, ValueError, "heads is -1"),
    ):
        given = {"state": state, "p": 0.1, "batch": 1, "heads": 1, "seqlen_q": 2, "seqlen_k": 2, **change}
        with pytest.raises(error, match=text):
            flashmask.dropout_mask(**given)


def test_as_torch_has_it():
    """Through the frontend of scaled_dot_product_attention: in training or not, and unbiased."""
    q, k, v = (x.transpose(1, 2) for x in tensors(seqlen=20))
    call = lambda p: flashmask.scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=True)
    torch.manual_seed(0)
    many = torch.stack([call(0.2) for _ in range(2000)])
    deviation = (many.mean(0) - call(0.0)).abs() / (many.std(0) / 2000**0.5)
    assert deviation.max() < 5


def test_a_default_device_is_not_where_the_host_writes():
    state = torch.tensor([1, 2])
    want = flashmask.dropout_mask(state, 0.5, 1, 2, 30, 40)
    with torch.device("meta"):
        assert torch.equal(flashmask.dropout_mask(state, 0.5, 1, 2, 30, 40), want)
        assert "with dropout" in flashmask.explain(*tensors_on(state.device), dropout=0.5)


def test_a_share_of_nothing_draws_nothing():
    q, k, v = tensors()
    before = torch.get_rng_state()
    assert torch.equal(flashmask_attention(q, k, v, dropout=0.0), flashmask_attention(q, k, v))
    given = flashmask_attention(q, k, v, dropout=0.0, dropout_state=torch.tensor([1, 2]))
    assert torch.equal(given, flashmask_attention(q, k, v)) and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"dropout": 1.0}, ValueError, "dropout is 1.0; it must be at least 0 and less than 1"),
        ({"dropout": -0.1}, ValueError, "dropout is -0.1"),
        ({"dropout": "0.1"}, TypeError, "dropout is '0.1'"),
        ({"dropout": 0.1, "dropout_state": torch.zeros(2)}, ValueError, r"dropout_state is .*int64 \[2\]"),
        ({"dropout": 0.1, "dropout_state": 3}, TypeError, "dropout_state is 3"),
        ({"dropout": 0.1, "dropout_state": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "meta"),
    ],
)
def test_what_dropout_refuses(arguments, error, text):
    with pytest.raises(error, match=text):
        flashmask_attention(*tensors(), **arguments)


def test_vmap_refuses_dropout():
    q, k, v = (torch.stack((x, x)) for x in tensors())
    call = lambda q, k, v: flashmask_attention(q, k, v, dropout=0.1, dropout_state=torch.tensor([1, 2]))
    with pytest.raises(NotImplementedError, match="vmap of dropout"):
        torch.func.vmap(call)(q, k, v)


# --- merge_attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_parts_are_merged_with_one_sink(layout):
    """Parts over some of the keys without the sink, and then the sink once, are the whole with it."""
    mask = masks.padding(S, S, [100, S], query_lengths=[120, S])

    def parts(q, k, v, sink):
        visible = mask.to_dense()
        made = []
        for a, b in ((0, 40), (40, S)):
            part = flashmask.masks.from_dense(visible[..., a:b])
            out, lse = flashmask_attention(q, k[:, a:b], v[:, a:b], part, return_softmax_lse=True)
            made.append((out.transpose(1, 2) if layout == "bhsd" else out, lse))
        out, lse = flashmask.merge_attention(*zip(*made), layout=layout, sink=sink)
        return (out.transpose(1, 2) if layout == "bhsd" else out), lse

    compare(parts, dense(mask.to_dense()), [*tensors(), torch.randn(HEADS)])


def test_sinks_that_do_not_fit_the_parts():
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    for sink, error, text in (
        (torch.zeros(3), ValueError, "sink has 3 entries; it must have one for each of the 2 heads"),
        (torch.zeros(2, 1), ValueError, r"sink has shape \[2, 1\]"),
        (torch.zeros(2, device="meta"), ValueError, "sink is on meta"),
        ([0.0, 0.0], TypeError, "sink is"),
    ):
        with pytest.raises(error, match=text):
            flashmask.merge_attention([out], [lse], sink=sink)


# --- The models that have them ------------------------------------------------------------------------------


class Module(torch.nn.Module):
    """Module with the attributes that transformers' eager attention reads."""

    num_key_value_groups, head_dim = 2, 16

    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))


@pytest.mark.parametrize("model, options", [("gpt_oss", {}), ("gemma2", {"softcap": 5.0})])
def test_as_transformers_models_write_it(model, options):
    module = Module()
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    leaves = [x.transpose(1, 2).requires_grad_() for x in tensors()]
    mask = masks.causal_document(seqlens=[60, S - 60])
    hidden = torch.zeros(1, 1, S, S).masked_fill(~mask.to_dense(), -torch.inf)
    theirs, _ = modeling.eager_attention_forward(module, *leaves, hidden, scaling=0.3, **options)
    sink = module.sinks if model == "gpt_oss" else None
    ours = flashmask_attention(*leaves, mask, softmax_scale=0.3, layout="bhsd", sink=sink, **options).transpose(1, 2)
    if sink is not None:
        leaves.append(sink)
    dout = torch.randn_like(ours)
    results = [(x, *torch.autograd.grad(x, leaves, dout)) for x in (ours, theirs)]
    for name, got, want in zip(("out", "dq", "dk", "dv", "dsink"), *results):
        assert_close(got, want, name, tolerance_of(name, DTYPE) * (2 if ON_CUDA else 1))  # theirs is rounded, too


# --- Partial results --------------------------------------------------------------------------------


host_alone = cpu_only("partial results")


def parts_of(q, k, v, dout, mask, **options):
    """out, lse, and dq, dk and dv, unrounded."""
    out, lse = ops.attention(q, k, v, mask, partial_out=True, **options)
    gradients = ops.partial_backward(
        dout, None, q, k, v, out, lse, mask, None, False, options.get("backend", "auto"), 0
    )
    return out, lse, *gradients


@host_alone
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_partial_results_are_those_of_float32(dtype, backend):
    """The bits of a call with the same values in float32, whose rounding is the ordinary result."""
    q, k, v = tensors(dtype)
    dout = torch.randn(2, S, HEADS, 8).to(dtype)
    mask = mask_with_blind_rows()
    got = parts_of(q, k, v, dout, mask, backend=backend)
    want = parts_of(*(x.float() for x in (q, k, v, dout)), mask, backend=backend)
    assert all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(got, want))
    assert torch.equal(got[0].to(dtype), ops.attention(q, k, v, mask, backend=backend)[0])


@host_alone
def test_partial_results_over_disjoint_keys_add_up():
    q, k, v = tensors(torch.bfloat16)
    dout, mask = torch.randn(2, S, HEADS, 8).bfloat16(), masks.causal_document(seqlens=[60, 90])
    want = parts_of(q, k, v, dout, mask)
    halves = [(0, 70), (70, S)]
    pieces = [(k[:, a:b], v[:, a:b], mask.gather([(0, S)], [(a, b)])) for a, b in halves]
    out, lse = merge_attention(*zip(*(ops.attention(q, *piece, partial_out=True) for piece in pieces)))
    torch.testing.assert_close((out, lse), want[:2], atol=2e-6, rtol=1e-5)
    parts = [
        ops.partial_backward(dout, None, q, *piece[:2], out, lse, piece[2], None, False, "cpu", 0) for piece in pieces
    ]
    gradients = sum(x[0] for x in parts), *(torch.cat(x, 1) for x in list(zip(*parts))[1:])
    torch.testing.assert_close(gradients, want[2:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_keys_alone_may_be_partial(dtype):
    """If out has the tensors' dtype, so has dq; dk and dv round to the ordinary backward's."""
    q, k, v = tensors(dtype)
    dout, mask = torch.randn(2, S, HEADS, 8).to(q.device, dtype), mask_with_blind_rows()
    out, lse = ops.attention(q, k, v, mask)
    call = dout, None, q, k, v, out, lse, mask, None, True, "auto", 0
    want, got = ops.backward(*call), ops.partial_backward(*call)
    assert [x.dtype for x in got] == [dtype, torch.float32, torch.float32]
    assert all(torch.equal(x.to(dtype), y) for x, y in zip(got, want))
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    with pytest.raises(ValueError, match=f"out is {other}.*must be float32".replace("torch.", "")):
        ops.partial_backward(*call[:5], out.to(other), *call[6:])


def test_opcheck_of_a_partial_backward():
    """Also with head dims that differ, and positions; and what is wrong is named."""
    q, k, v = tensors(torch.bfloat16)
    v = torch.cat([v, v], 3)
    dout, mask = torch.randn(2, S, HEADS, 16).to(q.device, torch.bfloat16), mask_with_blind_rows().to(q.device)
    out, lse = ops.attention(q, k, v, mask)
    bounds, block_mask, *band = operators.mask_arguments(mask)
    operator = torch.ops.flashmask.partial_backward.default
    call = dout, None, q, k, v, out, lse, bounds, block_mask, mask.plan(q.device), None, *band, True, "auto"
    torch.library.opcheck(operator, call)
    at = torch.arange(S, dtype=torch.int32, device=q.device)[None]
    torch.library.opcheck(operator, (*call[:7], None, None, None, None, True, None, -1, -1, True, "auto", 0, at, at))
    with pytest.raises(ValueError, match="v is bfloat16 .2, 149"):
        operator(*call[:4], v[:, :-1], *call[5:])


@host_alone
def test_partial_results_are_differentiable_and_trace():
    q, k, v = (x.requires_grad_() for x in tensors(torch.bfloat16))

    def call(q, k, v):
        out, lse = ops.attention(q, k, v, masks.causal(S), partial_out=True)
        assert out.dtype == torch.float32
        return out.sum() + lse.sum()

    want = torch.autograd.grad(call(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
    assert all(x.dtype == torch.bfloat16 and torch.equal(x, y) for x, y in zip(got, want))
