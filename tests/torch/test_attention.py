# SPDX-License-Identifier: Apache-2.0
"""flashmask_attention against attention over a dense matrix: families of masks, layouts, dtypes, and autograd."""

import functools

import dense_reference
import flashmask
import pytest
import torch
from dense_reference import assert_close, attention
from devices import DEVICE, DTYPE, ON_CUDA, cpu_only, head_dim_pairs, head_dims, put, tolerance_of
from flashmask import flashmask_attention, masks
from flashmask.torch import operators
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

S = 150
OTHER_BACKEND = "reference" if ON_CUDA else "cuda"  # takes no tensors of this device


def tensors(dtype=None, batch=2, seqlen_q=S, seqlen_k=S, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=8):
    """Random q, k and v on the device, of head dims that it takes."""
    head_dim, head_dim_v = head_dims(head_dim, head_dim_v)
    shapes = (
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
    )
    return put(*(torch.randn(shape, dtype=torch.float64) for shape in shapes), dtype=dtype)


def dense(q, k, v, visible, scale=None):
    """The reference, BSHD. visible [batch or 1, heads or 1, rows, keys], heads those of q or of k."""
    if visible.shape[1] == k.shape[2]:
        visible = visible.repeat_interleave(q.shape[2] // k.shape[2], 1)
    out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), visible, scale)
    return out.transpose(1, 2), lse


def compare(inputs, visible, call, scale=None):
    """`call(q, k, v)` -> (out, lse) and its gradients against the reference, for random gradients of both outputs."""
    q, _, v = inputs
    dout = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64, device=q.device)
    dense_reference.compare(call, lambda *x: dense(*x, visible, scale), inputs, dout, dlse)


DOCUMENTS = {"seqlens": [30, 1, 80, 39]}
FAMILIES = {
    "full": lambda: masks.full(S),
    "causal": lambda: masks.causal(S),
    "sliding_window": lambda: masks.sliding_window(S, S, 20),
    "sliding_window, both sides": lambda: masks.sliding_window(S, S, 20, 7),
    "causal_document": lambda: masks.causal_document(**DOCUMENTS),
    "document": lambda: masks.document(**DOCUMENTS),
    "shared_question": lambda: masks.shared_question([(40, [20, 30]), (10, [50])]),
    "global_sliding_window": lambda: masks.global_sliding_window(S, 5, 30),
    "causal_blockwise": lambda: masks.causal_blockwise(seqlens=[30, 50, 70]),
    "prefix_lm_causal": lambda: masks.prefix_lm_causal(S, 40),
    "prefix_lm_document": lambda: masks.prefix_lm_document(**DOCUMENTS, prefix=[7, 0, 20, 39]),
    "qk_sparse": lambda: masks.qk_sparse(S, [(20, 40), (90, 100)]),
    "hash_sparse": lambda: masks.hash_sparse(torch.arange(S) // 20, torch.arange(S) // 25, True),
    "eviction": lambda: masks.eviction(torch.arange(S) + 30),
    "random_eviction": lambda: masks.random_eviction(S, seed=3),
    "prefix_tree": lambda: masks.prefix_tree([-1, 0, 0, 2, -1], [40, 30, 20, 40, 20]),
    "padding": lambda: masks.padding(S, S, [100, S]),
    "attention_sink_window": lambda: masks.attention_sink_window(5, 20, **DOCUMENTS),
    "causal_with_blocks": lambda: masks.causal_with_blocks(
        torch.where(torch.arange(S) // 10 % 3 > 0, torch.arange(S) // 10, -1), **DOCUMENTS, window=25
    ),
    "block_causal": lambda: masks.block_causal(12, **DOCUMENTS, window=3),
    "block_diffusion": lambda: masks.block_diffusion(12, **DOCUMENTS)[0],
    "block_diffusion, concatenated": lambda: masks.block_diffusion(12, seqlen=S, order="concatenated")[0],
    "eagle3_ttt": lambda: masks.eagle3_ttt(3, **DOCUMENTS),
    "dflash": lambda: masks.dflash([0, 20, 31, 31, 90, S], 16, **DOCUMENTS),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16 if ON_CUDA else torch.float32])
@pytest.mark.parametrize("head_dim, head_dim_v", head_dim_pairs((16, 8)))
def test_families(family, dtype, head_dim, head_dim_v):
    mask = FAMILIES[family]().to(DEVICE)
    lengths = {"seqlen_q": mask.seqlen_q, "seqlen_k": mask.seqlen_k}
    compare(
        tensors(dtype, **lengths, head_dim=head_dim, head_dim_v=head_dim_v),
        mask.to_dense(),
        lambda q, k, v: flashmask_attention(q, k, v, mask, return_softmax_lse=True),
    )


def rule(seqlen_q, seqlen_k, bounds, causal):
    """The tensor's meaning, written down a second time. bounds [batch, heads, keys, n]."""
    rows = torch.arange(seqlen_q)[:, None]
    lts, *rest = bounds[:, :, None].unbind(-1)
    below = rows >= lts
    if causal and rest:
        below = below & (rows < rest[0])
    if causal:
        return ~below & (torch.arange(seqlen_k) <= rows + seqlen_k - seqlen_q)
    if len(rest) == 1:
        return ~(below | (rows < rest[0]))
    lte, uts, ute = rest
    return ~((below & (rows < lte)) | ((rows >= uts) & (rows < ute)))


@pytest.mark.parametrize("causal, vectors", [(True, 1), (True, 2), (False, 2), (False, 4)])
@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 2), (2, 4)])
def test_raw_tensors_mean_what_paddles_mean(causal, vectors, batch, heads):
    seqlen_q, seqlen_k = 130, S
    bounds = torch.randint(-5, seqlen_q + 5, (batch, heads, seqlen_k, vectors), dtype=torch.int32, device=DEVICE)
    compare(
        tensors(seqlen_q=seqlen_q),
        rule(seqlen_q, seqlen_k, bounds.cpu(), causal),
        lambda q, k, v: flashmask_attention(q, k, v, bounds, causal=causal, return_softmax_lse=True),
    )


def test_band_block_mask_and_scale():
    blocks = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool).repeat(1, 2, 1, 1)
    position, key = torch.arange(S)[:, None] + 4, torch.arange(S)
    band = (key <= position) & (key >= position - 60)
    kept = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :S, :S]
    compare(
        tensors(),
        band & kept,
        lambda q, k, v: flashmask_attention(
            q,
            k,
            v,
            causal=True,
            window_size=(60, -1),
            q_offset=4,
            block_mask=blocks.to(DEVICE),
            softmax_scale=0.1,
            return_softmax_lse=True,
        ),
        scale=0.1,
    )


@pytest.mark.parametrize("bounds_heads, block_heads", [(2, 4), (4, 2), (1, 4), (2, 1)])
def test_vectors_and_a_block_mask_with_heads_of_their_own(bounds_heads, block_heads):
    """heads_kv, heads_q or 1 each, of 2 key heads and 4 query heads."""
    bounds = torch.randint(0, S + 1, (1, bounds_heads, S, 2), dtype=torch.int32)
    blocks = torch.rand(2, block_heads, 2, 2) < 0.7
    kept = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :S, :S]
    visible = [x.repeat_interleave(4 // x.shape[1], 1) for x in (rule(S, S, bounds, False), kept)]
    given = {"startend_row_indices": bounds.to(DEVICE), "block_mask": blocks.to(DEVICE)}
    call = lambda q, k, v: flashmask_attention(q, k, v, **given, return_softmax_lse=True)
    compare(tensors(), visible[0] & visible[1], call)


@pytest.mark.parametrize("heads_q, heads_kv", [(1, 1), (3, 3), (6, 2), (4, 1)])
def test_grouped_heads(heads_q, heads_kv):
    mask = masks.causal(S)
    compare(
        tensors(heads_q=heads_q, heads_kv=heads_kv),
        mask.to_dense(),
        lambda q, k, v: flashmask_attention(q, k, v, mask, return_softmax_lse=True),
    )


@cpu_only("float64 is for the reference backend, which is the CPU's")
def test_gradcheck():
    q, k, v = (x.requires_grad_() for x in tensors(torch.float64, 1, 7, 9, 2, 1, 3, 2))
    mask = masks.from_startend(torch.randint(0, 8, (1, 2, 9, 4), dtype=torch.int32), causal=False, seqlen_q=7)

    def call(q, k, v):
        out, lse = flashmask_attention(q, k, v, mask, backend="reference", return_softmax_lse=True)
        return out, lse.masked_fill(torch.isinf(lse), 0)

    assert torch.autograd.gradcheck(call, (q, k, v))


def test_bhsd_is_a_view_of_the_same_result():
    q, k, v = tensors()
    mask = masks.causal(S)
    want, want_lse = flashmask_attention(q, k, v, mask, return_softmax_lse=True)
    got, lse = flashmask_attention(
        *(x.transpose(1, 2).contiguous() for x in (q, k, v)), mask, layout="bhsd", return_softmax_lse=True
    )
    assert torch.equal(got.transpose(1, 2), want) and torch.equal(lse, want_lse)


def test_packed_inputs_of_any_layout_are_not_copied():
    qkv = torch.randn(2, S, 3, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    mask = masks.causal(S)
    mask.plan(DEVICE)
    with torch.no_grad(), torch.profiler.profile() as profile:
        out = flashmask_attention(*qkv.unbind(2), mask)
        flashmask_attention(*qkv.transpose(1, 3).unbind(2), mask, layout="bhsd")
    seen = {event.key for event in profile.key_averages() if event.key.startswith(("aten::", "flashmask::"))}
    assert "flashmask::forward" in seen
    assert not [key for key in seen if any(word in key for word in ("copy", "contiguous", "clone", "to"))], seen
    assert torch.equal(out, flashmask_attention(*(x.contiguous() for x in qkv.unbind(2)), mask))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients_are_not_copied(layout):
    """Neither what reaches out nor what the parameters keep."""
    inputs = [x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in tensors(dtype=torch.bfloat16)]
    leaves = [x.requires_grad_() for x in inputs]
    out, lse = flashmask_attention(*leaves, causal=True, layout=layout, return_softmax_lse=True)
    gradients = torch.randn_like(out), torch.randn_like(lse)
    with torch.profiler.profile() as profile:
        torch.autograd.backward((out, lse), gradients)
    seen = {event.key for event in profile.key_averages() if event.key.startswith(("aten::", "flashmask::"))}
    assert "flashmask::backward" in seen
    assert not [key for key in seen if any(word in key for word in ("copy", "contiguous", "clone", "to"))], seen
    assert all(x.grad.stride() == x.stride() for x in leaves)


def test_gradients_reach_packed_inputs():
    qkv = torch.randn(2, S, 3, 4, *head_dims(16), device=DEVICE, dtype=DTYPE, requires_grad=True)
    mask = masks.causal(S)
    (got,) = torch.autograd.grad(flashmask_attention(*qkv.unbind(2), mask, deterministic=True).square().sum(), qkv)
    parts = [x.detach().contiguous().requires_grad_() for x in qkv.unbind(2)]
    want = torch.autograd.grad(flashmask_attention(*parts, mask, deterministic=True).square().sum(), parts)
    assert torch.equal(got, torch.stack(want, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16 if ON_CUDA else torch.float32])
def test_gradients_of_bhsd(dtype):
    """Against the reference; and they lie in memory as the parameters do, which takes no copy then."""
    inputs = [x.transpose(1, 2).contiguous() for x in tensors(dtype)]
    mask = masks.causal_document(seqlens=[100, 50], device=DEVICE)
    call = lambda q, k, v: flashmask_attention(q, k, v, mask, layout="bhsd", return_softmax_lse=True)
    dout, dlse = (
        torch.randn(2, 4, S, inputs[2].shape[3], dtype=torch.float64, device=DEVICE),
        torch.randn(2, 4, S, dtype=torch.float64, device=DEVICE),
    )
    dense_reference.compare(call, lambda *x: attention(*x, mask.to_dense()), inputs, dout, dlse)
    leaves = [x.requires_grad_() for x in inputs]
    assert all(x.is_contiguous() for x in torch.autograd.grad(call(*leaves)[0].square().sum(), leaves))


def test_expanded_gradients():
    inputs = [x.requires_grad_() for x in tensors()]
    out, lse = flashmask_attention(*inputs, causal=True, return_softmax_lse=True, deterministic=True)
    got = torch.autograd.grad((out.sum(), lse.sum()), inputs, retain_graph=True)
    want = torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("used", [0, 1])
def test_gradients_of_one_output_alone(used):
    inputs = tensors()
    visible = masks.causal(S).to_dense()
    leaves = [x.clone().requires_grad_() for x in inputs]
    got = torch.autograd.grad(flashmask_attention(*leaves, causal=True, return_softmax_lse=True)[used].sum(), leaves)
    doubles = [x.double().requires_grad_() for x in inputs]
    want = torch.autograd.grad(dense(*doubles, visible)[used].sum(), doubles, allow_unused=True)
    for name, a, b in zip(("dq", "dk", "dv"), got, want):
        assert_close(a, torch.zeros_like(a) if b is None else b, name, tolerance_of(name, DTYPE))


def test_rows_that_see_nothing():
    q, k, v = (x.requires_grad_() for x in tensors())
    mask = masks.from_startend(torch.zeros(1, 1, S, 1, dtype=torch.int32, device=DEVICE), causal=True, seqlen_q=S)
    out, lse = flashmask_attention(q, k, v, mask, return_softmax_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (1, 0, 0)])
def test_empty_tensors(batch, seqlen_q, seqlen_k):
    q, k, v = (x.requires_grad_() for x in tensors(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k))
    out = flashmask_attention(q, k, v, causal=True)
    assert out.shape == (batch, seqlen_q, 4, v.shape[3]) and (out == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("build", [masks.causal_document, masks.document])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0, 1, 100, "negated"])
def test_a_document_does_not_depend_on_its_neighbours(build, dtype, scale):
    """Not in one bit of its results and its gradients, whatever finite values the others hold; but on a GPU the unit of
    dq's sums follows the largest key and value."""
    lengths = [60, 90, 1, 300, 129]
    mask = build(seqlens=lengths).to(DEVICE)
    inputs = tensors(dtype, seqlen_q=sum(lengths), seqlen_k=sum(lengths))
    dout = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3], device=DEVICE).to(dtype)
    dlse = torch.randn(2, 4, sum(lengths), device=DEVICE)
    own = slice(151, 451)
    before = with_gradients(inputs, mask, dout, dlse)
    negated = lambda x: 2 * x if x is inputs[0] else -x
    other = negated if scale == "negated" else lambda x: torch.randn_like(x) * scale
    changed = [torch.where(mine(x, own), x, other(x)) for x in (*inputs, dout)]
    of_lse = torch.where(mine(dlse.mT, own)[..., 0].mT, dlse, other(dlse))
    after = with_gradients(changed[:3], mask, changed[3], of_lse)
    for name, a, b in zip(dense_reference.NAMES, after, before):
        at = (..., own) if name == "lse" else (slice(None), own)
        same_unit = name != "dq" or a.device.type == "cpu" or scale == "negated"
        assert torch.equal(a[at], b[at]) or not same_unit, name
        assert not torch.equal(a, b), name


def with_gradients(inputs, mask, dout, dlse):
    """(out, lse, dq, dk, dv), deterministic."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = flashmask_attention(*leaves, mask, deterministic=True, return_softmax_lse=True)
    return *results, *torch.autograd.grad(results, leaves, (dout, dlse))


@pytest.mark.parametrize(
    "build", [masks.causal, lambda n: masks.causal_document(seqlens=[n // 3, n - n // 3]), masks.full]
)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_deterministic_gradients_have_the_same_bits_in_every_run(build, heads_kv):
    n = 1000
    inputs, mask = tensors(seqlen_q=n, seqlen_k=n, heads_kv=heads_kv), build(n).to(DEVICE)
    dout, dlse = torch.randn(2, n, 4, inputs[2].shape[3], device=DEVICE).to(DTYPE), torch.randn(2, 4, n, device=DEVICE)
    want = with_gradients(inputs, mask, dout, dlse)
    for _ in range(30 if ON_CUDA else 2):
        assert all(torch.equal(a, b) for a, b in zip(with_gradients(inputs, mask, dout, dlse), want))


def mine(x, rows):
    """True at `rows` of BSHD."""
    at = torch.arange(x.shape[1], device=x.device)
    return ((at >= rows.start) & (at < rows.stop))[:, None, None]


@cpu_only("about threads of the CPU")
def test_results_do_not_depend_on_the_threads():
    inputs = tensors()
    threads = torch.get_num_threads()
    results = []
    for n in (1, 2):
        torch.set_num_threads(n)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = flashmask_attention(*leaves, causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_checkpointing():
    mask = masks.causal(S)
    inputs = [x.requires_grad_() for x in tensors()]
    call = lambda *x: flashmask_attention(*x, mask, deterministic=True)
    want = [call(*inputs)]
    got = [checkpoint(call, *inputs, use_reentrant=False)]
    for outs in (want, got):
        outs.extend(torch.autograd.grad(outs[0].square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if ON_CUDA else [torch.bfloat16])
def test_autocast(dtype):
    q, k, v = (x.requires_grad_() for x in tensors(torch.float32))
    with torch.autocast(DEVICE.type, dtype):
        out = flashmask_attention(q, k.to(dtype), v, causal=True)
    assert out.dtype == dtype
    assert torch.equal(out, flashmask_attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=True))
    out.float().square().sum().backward()
    doubles = [x.detach().to(dtype).double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(dense(*doubles, masks.causal(S).to_dense())[0].square().sum(), doubles)
    for name, x, gradient in zip(("dq", "dk", "dv"), (q, k, v), want):
        assert x.grad.dtype == torch.float32
        assert_close(x.grad, gradient, name, tolerance_of(name, dtype))


class Operators(TorchDispatchMode):
    """Records what reaches the operators: (name, arguments)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "flashmask":
            self.calls.append((function._opname, arguments))
        return function(*arguments, **(keywords or {}))


def test_one_plan_serves_all_layers_recomputations_and_backwards():
    mask = masks.causal_document(seqlens=[60, 90], device=DEVICE)
    q, k, v = (x.requires_grad_() for x in tensors(head_dim_v=16))

    def layers(q):
        return flashmask_attention(flashmask_attention(q, k, v, mask), k, v, mask)

    with Operators() as operators:
        checkpoint(layers, q, use_reentrant=False).sum().backward()
    names = [name for name, _ in operators.calls]
    assert sorted(set(names)) == ["backward", "forward", "plan"]
    assert [names.count(name) for name in ("plan", "forward", "backward")] == [1, 4, 2]


@pytest.mark.parametrize(
    "asked, everywhere, meant", [(None, False, False), (None, True, True), (False, True, False), (True, False, True)]
)
def test_deterministic_follows_torch_unless_it_is_given(asked, everywhere, meant):
    q, k, v = (x.requires_grad_() for x in tensors())
    torch.use_deterministic_algorithms(everywhere)
    try:
        with Operators() as operators:
            out = flashmask_attention(q, k, v, causal=True, deterministic=asked)
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    given = [arguments[-2] for name, arguments in operators.calls if name != "plan"]
    assert given == [meant, meant]


def test_a_mask_changed_before_the_backward_is_noticed():
    bounds = torch.full((1, 1, S, 1), S, dtype=torch.int32, device=DEVICE)
    q, k, v = (x.requires_grad_() for x in tensors())
    out = flashmask_attention(q, k, v, bounds, causal=True)
    bounds[:, :, 10] = 20
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def startend(keys, vectors):
    return {"startend_row_indices": torch.zeros(1, 1, keys, vectors, dtype=torch.int32, device=DEVICE)}


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"softcap": -1.0}, ValueError, "softcap is -1; it must be 0 .none. or between 1e-18 and 256"),
        ({"softcap": "30"}, TypeError, "softcap is '30' .*; it must be a float"),
        ({"sink": [0.0] * 4}, TypeError, r"sink is \[0.0, .*; it must be a torch.Tensor \[heads_q\]"),
        ({"sink": torch.zeros(3, device=DEVICE)}, ValueError, r"sink is float32 \[3\]; it must be float32 \[4\]"),
        ({"sink": torch.zeros(4, dtype=torch.float64, device=DEVICE)}, ValueError, "sink is float64"),
        ({"sink": torch.zeros(4, device="meta")}, ValueError, "sink is on meta and query on"),
        ({"k_pos": torch.zeros(1, S)}, ValueError, "q_pos is None and k_pos is given"),
        ({"startend_row_indices": masks.causal(S), "k_pos": torch.zeros(1, S)}, ValueError, "k_pos"),
        ({"max_ctas": -1}, ValueError, "max_ctas is -1; it must be between 0 and 2147483647"),
        ({"max_ctas": 2**31}, ValueError, "max_ctas is 2147483648; it must be between 0 and 2147483647"),
        ({"max_ctas": "8"}, TypeError, "max_ctas is '8'"),
        ({"layout": "sbhd"}, ValueError, "layout is 'sbhd'; it must be 'bshd' or 'bhsd'"),
        (startend(S, 3), ValueError, "LTS, LTE, UTS, UTE"),
        (startend(9, 2), ValueError, "9 columns"),
        ({"backend": OTHER_BACKEND}, RuntimeError, f"no backend takes this call: {OTHER_BACKEND}: "),
    ],
)
def test_what_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        flashmask_attention(*tensors(), **arguments)


@pytest.mark.parametrize("packed", [False, True])
def test_max_ctas_reaches_both_directions_and_changes_no_bit(monkeypatch, packed):
    seen, results = [], []
    forward, backward = operators._forward_operator, operators._backward_operator
    monkeypatch.setattr(operators, "_forward_operator", lambda *x: seen.append(x[-1]) or forward(*x))
    monkeypatch.setattr(operators, "_backward_operator", lambda *x: seen.append(x[-1]) or backward(*x))
    for max_ctas in (0, 2):
        torch.manual_seed(0)
        q, k, v = leaves = [x.requires_grad_() for x in tensors()]
        options = {"causal": True, "deterministic": True, "max_ctas": max_ctas}
        if packed:
            out = flashmask.flashmask_varlen_func(q[0], k[0], v[0], [0, S], [0, S], **options)
        else:
            out = flashmask_attention(q, k, v, **options)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert seen == ["auto", "auto", 2, 2]


def test_max_ctas_reaches_a_compiled_graph():
    graphs = []
    attend = torch.compile(
        functools.partial(flashmask_attention, max_ctas=5), backend=lambda graph, _: graphs.append(graph) or graph
    )
    attend(*tensors())
    calls = [node.args for node in graphs[0].graph.nodes if "flashmask.forward" in str(node.target)]
    assert len(calls) == 1 and calls[0][-1] == 5


def test_a_mask_of_other_lengths_is_refused():
    with pytest.raises(ValueError, match="the mask is for 100 query rows and 100 keys"):
        flashmask_attention(*tensors(), masks.causal(100))


def test_a_tensor_with_the_wrong_number_of_dimensions_is_named():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="key has shape .*4 dimensions"):
        flashmask_attention(q, k[0], v)
