# SPDX-License-Identifier: Apache-2.0
"""Messages of every public function for wrong arguments: the argument, the value, the accepted values."""

import re
import sys

import flashmask
import numpy as np
import pytest
import torch
from devices import DEVICE, ON_CUDA, head_dims, put
from flashmask import (
    Mask,
    flashmask_attention,
    flashmask_varlen_func,
    masks,
    merge_attention,
    ops,
    scaled_dot_product_attention,
)
from flashmask.varlen import varlen_mask

S = 20
operators = torch.ops.flashmask
ELSEWHERE = ["meta", "cpu"] if ON_CUDA else ["meta"]  # devices that the tests' tensors are not on
FAR = "; it must be between -2^40 and 2^40"


def tensors(heads=2):
    return put(*(torch.randn(1, S, heads, *head_dims(16)) for _ in range(3)))


def bounds(seqlen=S):
    return torch.zeros(1, 1, seqlen, 2, dtype=torch.int32, device=DEVICE)


def block_mask():
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=DEVICE)


# --- Devices ------------------------------------------------------------------------------------------


def forward_arguments():
    q, k, v = tensors()
    plan = operators.plan(bounds(), block_mask(), S, S, False, None, -1, -1, DEVICE)
    return {
        "query": q,
        "key": k,
        "value": v,
        "startend_row_indices": bounds(),
        "block_mask": block_mask(),
        "plan": plan,
    }


OPTIONS = (None, False, None, -1, -1, False, "auto")


def backward_arguments():
    given = forward_arguments()
    out, lse = operators.forward(*given.values(), *OPTIONS)
    outputs = {"dout": torch.randn_like(out), "dlse": torch.randn_like(lse)}
    tensors = list(given.items())
    return {**outputs, **dict(tensors[:3]), "out": out, "lse": lse, **dict(tensors[3:])}


def with_gradients(query, key, value):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    return flashmask_attention(*leaves, causal=True)


CALLS = {
    "flashmask_attention": (lambda: dict(zip(("query", "key", "value"), tensors())), flashmask_attention),
    "with gradients": (lambda: dict(zip(("query", "key", "value"), tensors())), with_gradients),
    "scaled_dot_product_attention": (
        lambda: dict(zip(("query", "key", "value"), tensors())),
        scaled_dot_product_attention,
    ),
    "flashmask_varlen_func": (
        lambda: {
            **{name: x[0] for name, x in zip("qkv", tensors())},
            "cu_seqlens_q": torch.tensor([0, S], device=DEVICE),
            "cu_seqlens_k": torch.tensor([0, S], device=DEVICE),
        },
        flashmask_varlen_func,
    ),
    "ops.attention": (lambda: dict(zip("qkv", tensors())), ops.attention),
    "flashmask::forward": (forward_arguments, lambda **x: operators.forward(*x.values(), *OPTIONS)),
    "flashmask::backward": (backward_arguments, lambda **x: operators.backward(*x.values(), *OPTIONS)),
    "flashmask::plan": (
        lambda: {"startend_row_indices": bounds(), "block_mask": block_mask()},
        lambda **x: operators.plan(*x.values(), S, S, False, None, -1, -1, DEVICE),
    ),
    "merge_attention": (
        lambda: {"outs[0]": tensors()[0], "outs[1]": tensors()[0], "lses[0]": torch.zeros(1, 2, S, device=DEVICE)},
        lambda **x: merge_attention(list(x.values())[:2], [*x.values()][2:] * 2),
    ),
}


TENSORS = {"flashmask::forward": 6, "flashmask::backward": 10, "flashmask_varlen_func": 5, "flashmask::plan": 2}


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("name, argument", [(name, n) for name in CALLS for n in range(TENSORS.get(name, 3))])
def test_a_tensor_on_another_device_is_named(name, argument, elsewhere):
    """The result is never memory that was not written, either."""
    make, call = CALLS[name]
    given = make()
    moved = list(given)[argument]
    with pytest.raises(ValueError, match=r"is on .* and .* on .*; all tensors of a call must be on one device"):
        call(**{**given, moved: given[moved].to(elsewhere)})
    call(**given)


@pytest.mark.parametrize("part", [{"startend_row_indices": bounds}, {"block_mask": block_mask}])
@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_a_mask_on_another_device_is_named(part, elsewhere):
    ((name, make),) = part.items()
    with pytest.raises(ValueError, match=f"the mask is on {elsewhere} .* move the mask first"):
        flashmask_attention(*tensors(), **{name: make().to(elsewhere)})


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_explain_says_that_a_tensor_is_elsewhere(elsewhere):
    q, k, v = tensors()
    assert f"refused   key is on {elsewhere} and query on {DEVICE}" in flashmask.explain(q, k.to(elsewhere), v)


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_traces_know_where_tensors_are(elsewhere):
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = forward_arguments()
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in given.items()}
        assert operators.forward(*fakes.values(), *OPTIONS)[0].device == DEVICE
        with pytest.raises(ValueError, match="plan is on"):
            operators.forward(*{**fakes, "plan": fakes["plan"].to(elsewhere)}.values(), *OPTIONS)


# --- Tensors that are none ----------------------------------------------------------------------------


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(n, 2, *head_dims(16)) for n in (3, 5)], layout=layout)


WRONG_TENSORS = {
    "None": (lambda x: None, "{name} is None; it must be a torch.Tensor"),
    "a list": (lambda x: [[1.0]], r"{name} is \[\[1.0\]\] \(list\); it must be a torch.Tensor"),
    "numpy": (lambda x: x.cpu().float().numpy(), "{name} is a numpy.ndarray, float32 .*; it must be a torch.Tensor"),
    "a string": (lambda x: "q", r"{name} is 'q' \(str\); it must be a torch.Tensor"),
    "nested": (lambda x: nested(torch.strided), "{name} is a nested tensor; it must be a dense tensor"),
    "jagged": (lambda x: nested(torch.jagged), "{name} is a nested tensor; it must be a dense tensor"),
    "sparse": (
        lambda x: x.float().to_sparse(),
        "{name} is a tensor, .* of layout torch.sparse_coo; it must be a dense tensor",
    ),
}


FRONTS = ("flashmask_attention", "scaled_dot_product_attention", "flashmask_varlen_func", "ops.attention")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", WRONG_TENSORS)
@pytest.mark.parametrize("name, argument", [(name, n) for name in FRONTS for n in range(3)])
def test_what_is_no_tensor_is_named(name, argument, kind):
    make, call = CALLS[name]
    change, text = WRONG_TENSORS[kind]
    given = make()
    names = {"ops.attention": ("query", "key", "value")}.get(name, tuple(given))
    key = list(given)[argument]
    with pytest.raises(TypeError, match=text.format(name=names[argument])):
        call(**{**given, key: change(given[key])})


def attend(**arguments):
    return flashmask_attention(*tensors(), **arguments)


def packed(*cu_seqlens, **arguments):
    return flashmask_varlen_func(*(x[0] for x in tensors()), *cu_seqlens, **arguments)


def sdpa(**arguments):
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors()), **arguments)


CU = [0, 8, S]
BOTH = {"seqlens": [3, 2]}


@pytest.mark.parametrize(
    "call, error, text",
    [
        # flashmask_attention
        (lambda: attend(window_size="ab"), TypeError, "window_size is 'ab' (str); it must be an int or (left, right)"),
        (
            lambda: attend(window_size=(1.5, 0)),
            TypeError,
            "window_size is (1.5, 0) (tuple); it must be an int or (left, right)",
        ),
        (lambda: attend(window_size=True), TypeError, "window_size is True (bool); it must be an int or (left, right)"),
        (
            lambda: attend(window_size=(1, 2, 3)),
            ValueError,
            "window_size has 3 entries; it must be an int or (left, right)",
        ),
        (
            lambda: attend(window_size=(-2, 0)),
            ValueError,
            "window_size is (-2, 0); each side must be at least 0, or -1 for open",
        ),
        (lambda: attend(causal="yes"), TypeError, "causal is 'yes' (str); it must be True or False"),
        (lambda: attend(causal=None), TypeError, "causal is None; it must be True or False"),
        (lambda: attend(causal=True, q_offset=1.0), TypeError, "q_offset is 1.0 (float); it must be an int"),
        (lambda: attend(causal=True, q_offset=2**63), ValueError, FAR),
        (lambda: attend(softmax_scale="1"), TypeError, "softmax_scale is '1' (str); it must be a float"),
        (
            lambda: attend(softmax_scale=torch.tensor(1.0)),
            TypeError,
            "softmax_scale is a tensor, torch.float32 []; it must be a float",
        ),
        (lambda: attend(deterministic="yes"), TypeError, "deterministic is 'yes' (str); it must be True or False"),
        (lambda: attend(layout=["bshd"]), TypeError, "layout is ['bshd'] (list); it must be 'bshd' or 'bhsd'"),
        (lambda: attend(backend=None), TypeError, "backend is None; it must be a string"),
        (
            lambda: attend(startend_row_indices=[[1]]),
            TypeError,
            "startend_row_indices is a list; it must be a flashmask.Mask, a tensor or None",
        ),
        (lambda: attend(block_mask=np.ones((1, 1, 1, 1))), TypeError, "block_mask is a ndarray; it must be a tensor"),
        # flashmask_varlen_func and its mask
        (lambda: packed("ab", CU), TypeError, "cu_seqlens_q must be integers"),
        (lambda: packed(CU, None), TypeError, "cu_seqlens_k must be integers"),
        (lambda: packed([0, 1.5], CU), TypeError, "cu_seqlens_q is torch.float32; it must be integers"),
        (lambda: packed(3, CU), ValueError, "cu_seqlens_q has shape (); it must be (documents + 1,)"),
        (lambda: packed([], CU), ValueError, "cu_seqlens_q has shape (0,); it must be (documents + 1,)"),
        (lambda: packed([[0, S]], CU), ValueError, "cu_seqlens_q has shape (1, 2); it must be (documents + 1,)"),
        (lambda: packed(CU, CU, window_size=("a", 0)), TypeError, "window_size is ('a', 0) (tuple); it must be"),
        (lambda: packed(CU, CU, causal="no"), TypeError, "causal is 'no' (str); it must be True or False"),
        (lambda: varlen_mask(CU, CU, 20.0, S), TypeError, "total_q is 20.0 (float); it must be an int"),
        (lambda: varlen_mask(CU, CU, S, -1), ValueError, "total_k is -1; it must be between 0 and 2147483647"),
        (
            lambda: varlen_mask(CU, [1, 2, S], S, S),
            ValueError,
            "cu_seqlens_k[0] is 1; cu_seqlens_k must begin with 0 and ascend",
        ),
        (
            lambda: varlen_mask([0, 9, 8], CU, S, S),
            ValueError,
            "cu_seqlens_q[2] is 8; cu_seqlens_q must begin with 0 and ascend",
        ),
        (
            lambda: varlen_mask(CU, [0, 9, S + 1], S, S),
            ValueError,
            f"cu_seqlens_k[2] is {S + 1}; it must be at most the number of keys, {S}",
        ),
        # scaled_dot_product_attention
        (lambda: sdpa(is_causal="yes"), TypeError, "is_causal is 'yes' (str); it must be True or False"),
        (lambda: sdpa(enable_gqa=None), TypeError, "enable_gqa is None; it must be True or False"),
        (lambda: sdpa(scale="1"), TypeError, "softmax_scale is '1' (str); it must be a float"),
        (
            lambda: sdpa(attn_mask=np.ones(3)),
            TypeError,
            "attn_mask is a numpy.ndarray, float64 [3]; it must be a Mask or a bool tensor",
        ),
        # merge_attention
        (lambda: merge_attention(None, []), TypeError, "outs is None; it must be a list or tuple"),
        (
            lambda: merge_attention([None], [torch.zeros(1, 2, S)]),
            TypeError,
            "outs[0] is None; it must be a torch.Tensor",
        ),
        (
            lambda: merge_attention([torch.zeros(1, S, 2, 4)], [[0.0]]),
            TypeError,
            "lses[0] is [0.0] (list); it must be a torch.Tensor",
        ),
        (
            lambda: merge_attention([torch.zeros(1, S, 2, 4)], [torch.zeros(1, 2, S)], layout=3),
            TypeError,
            "layout is 3 (int); it must be",
        ),
        # Mask
        (lambda: Mask(5.0, 5), TypeError, "seqlen_q is 5.0 (float); it must be an int"),
        (lambda: Mask(5, "5"), TypeError, "seqlen_k is '5' (str); it must be an int"),
        (lambda: Mask(True, 5), TypeError, "seqlen_q is True (bool); it must be an int"),
        (lambda: Mask(4, 4, causal="no"), TypeError, "causal is 'no' (str); it must be True or False"),
        (lambda: Mask(4, 4, window="ab"), TypeError, "window is 'ab' (str); it must be"),
        (lambda: Mask(4, 4, q_offset="1"), TypeError, "q_offset is '1' (str); it must be an int"),
        (lambda: Mask(4, 4, q_offset=-(2**40) - 1), ValueError, FAR),
        (lambda: Mask(4, 4).replace(q_offset=10**30), ValueError, FAR),
        (lambda: masks.causal(4).replace(seqlen_q=4.5), TypeError, "seqlen_q is 4.5 (float); it must be an int"),
        (lambda: masks.causal(4).to_block_mask(heads=2.0), TypeError, "heads is 2.0 (float); it must be an int"),
        (lambda: masks.causal(4).to_block_mask(batch=0), ValueError, "batch is 0; it must be at least 1"),
        (lambda: masks.causal(4).plot(max_cells="a"), TypeError, "max_cells is 'a' (str); it must be an int"),
        (lambda: masks.causal(4).plot(head=0.0), TypeError, "head is 0.0 (float); it must be an int"),
        # The builders
        (lambda: masks.causal(5.0), TypeError, "seqlen_q is 5.0 (float); it must be an int"),
        (lambda: masks.full(4, "4"), TypeError, "seqlen_k is '4' (str); it must be an int"),
        (lambda: masks.causal(4, q_offset=0.5), TypeError, "q_offset is 0.5 (float); it must be an int"),
        (lambda: masks.causal(4, q_offset=2**64), ValueError, FAR),
        (lambda: masks.sliding_window(4, 4, "a"), TypeError, "window is ('a', 0) (tuple); it must be"),
        (lambda: masks.causal_document(**BOTH, seqlen=5.0), TypeError, "seqlen is 5.0 (float); it must be an int"),
        (
            lambda: masks.causal_document(**BOTH, seqlen=-1),
            ValueError,
            "seqlen is -1; it must be between 0 and 2147483647",
        ),
        (lambda: masks.document(3), ValueError, "cu_seqlens is a single number; it must be [..., n]"),
        (lambda: masks.prefix_lm_document(**BOTH, prefix="ab"), TypeError, "prefix must be integers"),
        (
            lambda: masks.shared_question([(5, 3)]),
            TypeError,
            "groups is [(5, 3)] (list); it must be [(question, [answer, ...]), ...]",
        ),
        (lambda: masks.shared_question(5), TypeError, "groups is 5 (int); it must be [(question, [answer, ...]), ...]"),
        (
            lambda: masks.shared_question(**BOTH, is_question=[1.0, 0.0]),
            TypeError,
            "is_question is torch.float32; it must be bools",
        ),
        (lambda: masks.attention_sink_window(1.0, 2, **BOTH), TypeError, "sink is 1.0 (float); it must be an int"),
        (lambda: masks.attention_sink_window(1, "2", **BOTH), TypeError, "window is '2' (str); it must be an int"),
        (lambda: masks.block_causal(2.0, seqlen=4), TypeError, "blocks is 2.0 (float); it must be an int"),
        (lambda: masks.block_causal("ab", seqlen=4), TypeError, "blocks must be integers"),
        (lambda: masks.causal_with_blocks([1, 1], window=1.0), TypeError, "window is 1.0 (float); it must be an int"),
        (
            lambda: masks.block_diffusion(2, seqlen=4, order=1),
            TypeError,
            "order is 1 (int); it must be 'interleaved' or 'concatenated'",
        ),
        (lambda: masks.eagle3_ttt(1.5, seqlen=4), TypeError, "steps is 1.5 (float); it must be an int"),
        (lambda: masks.dflash([1], 2.0, seqlen=4), TypeError, "block is 2.0 (float); it must be an int"),
        (lambda: masks.global_sliding_window(4.0, 1, 1), TypeError, "seqlen is 4.0 (float); it must be an int"),
        (lambda: masks.global_sliding_window(4, None, 1), TypeError, "global_tokens is None; it must be an int"),
        (lambda: masks.global_sliding_window(4, 1, -1), ValueError, "window is -1; it must be at least 0"),
        (lambda: masks.prefix_lm_causal("4", 1), TypeError, "seqlen is '4' (str); it must be an int"),
        (lambda: masks.prefix_lm_causal(4, 1.0), TypeError, "prefix is 1.0 (float); it must be an int"),
        (lambda: masks.qk_sparse(4.0, []), TypeError, "seqlen is 4.0 (float); it must be an int"),
        (lambda: masks.qk_sparse(4, 3), ValueError, "dropped is a single number; it must be [..., spans, 2]"),
        (lambda: masks.eviction(3), ValueError, "evicted_at is a single number; it must be [..., seqlen]"),
        (lambda: masks.random_eviction(9.0), TypeError, "seqlen is 9.0 (float); it must be an int"),
        (lambda: masks.random_eviction(9, seed="a"), TypeError, "seed is 'a' (str); it must be an int"),
        (lambda: masks.random_eviction(9, seed=2**63), ValueError, f"seed is {2**63}; it must be between"),
        (
            lambda: masks.hash_sparse(1, [1], True),
            ValueError,
            "query_buckets is a single number; it must be [..., seqlen_q]",
        ),
        (lambda: masks.hash_sparse([1], [1], "no"), TypeError, "causal is 'no' (str); it must be True or False"),
        (lambda: masks.prefix_tree(-1), ValueError, "parents is a single number; it must be [..., nodes]"),
        (lambda: masks.prefix_tree([-1], 3), ValueError, "lengths is a single number; it must be [..., nodes]"),
        (
            lambda: masks.prefix_tree_from_intervals(0, 1, seqlen=1),
            ValueError,
            "tin is a single number; it must be [..., nodes]",
        ),
        (lambda: masks.padding(4.0, 4, [1]), TypeError, "seqlen_q is 4.0 (float); it must be an int"),
        (lambda: masks.padding(4, 4, 1), ValueError, "key_lengths is a single number; it must be [batch]"),
        (
            lambda: masks.from_startend(bounds(), causal="no"),
            TypeError,
            "causal is 'no' (str); it must be True or False",
        ),
        (lambda: masks.from_dense(None), ValueError, "visible is None; it must be bool or uint8"),
    ],
)
def test_wrong_arguments(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    "given, text",
    [
        ({"softmax_scale": "1"}, "softmax_scale is '1' (str); it must be a float"),
        ({"backend": 3}, "backend is 3 (int); it must be a string"),
        ({"deterministic": "no"}, "deterministic is 'no' (str); it must be True or False"),
        ({"window_size": "ab"}, "window_size is 'ab' (str); it must be"),
    ],
)
def test_explain_says_which_argument_is_wrong(given, text):
    assert flashmask.explain(*tensors(), **given).startswith(f"refused   {text}")


# --- What is accepted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda x: np.array(x, dtype=np.int32), torch.tensor])
def test_cu_seqlens_in_every_form(form):
    cu = torch.tensor(CU, device=DEVICE)
    given = form(CU)
    given = given.to(DEVICE) if isinstance(given, torch.Tensor) else given
    q, k, v = (x[0] for x in tensors())
    got, want = (flashmask_varlen_func(q, k, v, x, x, causal=True) for x in (given, cu))
    assert torch.equal(got, want)
    got, want = (varlen_mask(x, x, S, S, causal=True, device=DEVICE).bounds for x in (given, cu))
    assert torch.equal(got, want)


def test_trees_in_numpy():
    parents, lengths, ends = [-1, 0, 0], [2, 1, 3], ([0, 2, 3], [6, 3, 6])
    want = masks.prefix_tree(parents, lengths).bounds
    assert torch.equal(masks.prefix_tree(np.array(parents), np.array(lengths)).bounds, want)
    assert torch.equal(masks.prefix_tree_from_intervals(*map(np.array, ends)).bounds, want)


def test_numbers_of_other_libraries():
    assert masks.causal(np.int64(4)).seqlen_q == 4 and type(masks.causal(np.int64(4)).seqlen_q) is int
    assert Mask(4, 4, causal=np.True_).causal is True and Mask(4, 4, causal=1).causal is True
    assert Mask(4, 4, window=(np.int32(2), None)).window == (2, -1)
    q, k, v = tensors()
    got, want = (flashmask_attention(q, k, v, softmax_scale=scale) for scale in (np.float32(0.5), 0.5))
    assert torch.equal(got, want)
    assert masks.causal(4).seqlen_k == 4


@pytest.mark.parametrize("infinite", [sys.maxsize, 2**62, 2**63, 10**30, None, -1])
def test_infinite_windows_are_open(infinite):
    q, k, v = tensors()
    want = flashmask_attention(q, k, v, causal=True)
    assert torch.equal(flashmask_attention(q, k, v, causal=True, window_size=(infinite, 0)), want)
    assert torch.equal(flashmask_attention(q, k, v, window_size=(infinite, 0)), want)
    assert torch.equal(flashmask_attention(q, k, v, causal=True, window_size=(infinite, infinite)), want)
    if infinite is not None:
        assert torch.equal(flashmask_attention(q, k, v, causal=True, window_size=infinite), want)
        near = {"cu_seqlens": CU, "seqlen": S}
        assert torch.equal(masks.attention_sink_window(0, infinite, **near).bounds, masks.causal_document(CU).bounds)
    got, want = (varlen_mask(CU, CU, S, S, window_size=(side, 0)).bounds for side in (infinite, -1))
    assert torch.equal(got, want)
    assert Mask(4, 4, window=(infinite, 3)).window == (-1, 3)
    assert masks.sliding_window(4, 4, infinite, infinite).window is None
    assert masks.causal(4).replace(window=(infinite, 0)).to_dense().equal(masks.causal(4).to_dense())


def test_an_infinite_window_of_global_tokens():
    assert masks.global_sliding_window(9, 2, sys.maxsize).to_dense().all()
    assert masks.block_causal(2, seqlen=9, window=sys.maxsize).bounds.equal(masks.block_causal(2, seqlen=9).bounds)
