# SPDX-License-Identifier: Apache-2.0
"""The operators themselves: what torch checks of any operator, their errors, and what loading them does."""

import inspect
import os
import re
import subprocess
import sys

import flashmask
import pytest
import torch
from devices import DEVICE, ON_CUDA, cpu_only, head_dims, put
from flashmask._core.call_options import OPTIONS, AttentionOptions
from flashmask.torch import operators as operator_calls
from flashmask.torch import ops
from torch._subclasses import FakeTensorMode

operators = torch.ops.flashmask


def inputs(dtype=None, batch=2, seqlen_q=70, seqlen_k=90, heads_q=4, heads_kv=2, head_dim=8, head_dim_v=6):
    if head_dim <= 256:
        head_dim, head_dim_v = head_dims(head_dim, head_dim_v)
    shapes = (
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
    )
    return put(*(torch.randn(shape) for shape in shapes), dtype=dtype)


def bounds(seqlen_q=70, seqlen_k=90, batch=2, heads=1, vectors=1):
    return torch.randint(0, seqlen_q + 1, (batch, heads, seqlen_k, vectors), dtype=torch.int32).to(DEVICE)


def block_mask(seqlen_q=70, seqlen_k=90, heads=2):
    return (torch.rand(1, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)) < 0.7).to(DEVICE)


# bounds, block_mask, causal, q_offset, window_left, window_right
MASKS = {
    "none": lambda: (None, None, False, None, -1, -1),
    "causal": lambda: (None, None, True, None, -1, -1),
    "band": lambda: (None, None, True, 3, 20, -1),
    "causal bounds": lambda: (bounds(), None, True, None, -1, -1),
    "heads": lambda: (bounds(heads=4, batch=1, vectors=4), None, False, None, -1, 5),
    "blocks": lambda: (None, block_mask(), False, None, -1, -1),
    "bounds and blocks": lambda: (bounds(vectors=2), block_mask(), False, -4, -1, -1),
}


@pytest.mark.parametrize("mask", MASKS)
def test_opcheck(mask):
    tensors, band = (made := MASKS[mask]())[:2], made[2:]
    torch.library.opcheck(operators.plan.default, (*tensors, 70, 90, *band, DEVICE))
    plan = operators.plan(*tensors, 70, 90, *band, DEVICE)
    arguments = (*tensors, plan, 0.3, *band, True, "auto")  # deterministic: its gradients are compared
    q, k, v = inputs()
    torch.library.opcheck(operators.forward.default, (q, k, v, *arguments))
    for x in (q, k, v):
        x.requires_grad_()
    torch.library.opcheck(operators.forward.default, (q, k, v, *arguments))
    torch.library.opcheck(operators.forward.default, (q, k, v, *arguments, 3))  # max_ctas


@pytest.mark.parametrize("mask", MASKS)
def test_opcheck_of_backward(mask):
    tensors, band = (made := MASKS[mask]())[:2], made[2:]
    plan = operators.plan(*tensors, 70, 90, *band, DEVICE)
    q, k, v = inputs()
    out, lse = operators.forward(q, k, v, *tensors, plan, None, *band, False, "auto")
    torch.library.opcheck(
        operators.backward.default,
        (torch.randn_like(out), None, q, k, v, out, lse, *tensors, plan, None, *band, True, "auto"),
    )


# --- Features -----------------------------------------------------------------------------------------


def feature(name, heads=4, rows=70, keys=90):
    """A value that asks for it."""
    values = {
        "sink": lambda: torch.zeros(heads, device=DEVICE),
        "q_pos": lambda: torch.zeros(1, rows, dtype=torch.int32, device=DEVICE),
        "k_pos": lambda: torch.zeros(1, keys, dtype=torch.int32, device=DEVICE),
        "dropout_state": lambda: torch.zeros(2, dtype=torch.int64, device=DEVICE),
        "dropout_p": lambda: 0.1,
        "softcap": lambda: 30.0,
        "alibi_slopes": lambda: torch.zeros(heads, device=DEVICE),
        "split_size": lambda: 128,
    }
    return values[name]()


FEATURES = ("sink", "q_pos", "k_pos", "dropout_state", "dropout_p", "softcap", "alibi_slopes", "split_size")
PLAIN = (None, None, None, None, False, None, -1, -1, False, "auto")


@pytest.mark.parametrize("name, other", [("q_pos", "k_pos"), ("k_pos", "q_pos")])
def test_positions_come_together(name, other):
    """Also where Python does not look."""
    q, k, v = inputs()
    out, lse = attend(q, k, v)
    for call, arguments in (
        (operators.forward, (q, k, v, *PLAIN)),
        (operators.backward, (torch.randn_like(out), None, q, k, v, out, lse, *PLAIN)),
        (operators.plan, (None, None, 70, 90, False, None, -1, -1, DEVICE)),
    ):
        with pytest.raises(ValueError, match=f"{other} is absent and {name} is given"):
            call(*arguments, **{name: feature(name)})


@pytest.mark.parametrize(
    "state", [torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros((), dtype=torch.int64)]
)
def test_a_dropout_state_is_a_seed_and_an_offset(state):
    with pytest.raises(ValueError, match=r"dropout_state must be int64 \[2\]"):
        operators.forward(*inputs(), *PLAIN, dropout_p=0.1, dropout_state=state.to(DEVICE))


def test_dropout_needs_a_state():
    with pytest.raises(ValueError, match="dropout_state is null; with dropout_p 0.1 it must be a seed and an offset"):
        operators.forward(*inputs(), *PLAIN, dropout_p=0.1)


def test_options_are_those_of_the_schemas():
    for name in ("forward", "backward"):
        schema = getattr(operators, name).default._schema.arguments[-len(AttentionOptions._fields) :]
        assert tuple(x.name for x in schema) == AttentionOptions._fields
        assert {x.name: x.default_value for x in schema if x.has_default_value()} == AttentionOptions._field_defaults
    defaults = {option.name: option.default for option in OPTIONS}
    for function in (flashmask.flashmask_attention, flashmask.flashmask_varlen_func, ops.attention, AttentionOptions):
        for name, parameter in inspect.signature(function).parameters.items():
            if name in defaults and parameter.default is not parameter.empty:
                assert parameter.default == defaults[name], name


@pytest.mark.parametrize("name", FEATURES)
def test_traces_carry_features(name):
    q, k, v = inputs()
    out, lse = attend(q, k, v)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = operators.forward(q, k, v, *PLAIN, **{name: feature(name)})
        *gradients, dsink = operators.backward(out, None, q, k, v, out, lse, *PLAIN, **{name: feature(name)})
    assert [x.shape for x in traced] == [out.shape, lse.shape]
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert dsink.shape == ((4,) if name == "sink" else (0,)) and dsink.dtype == torch.float32


@pytest.mark.parametrize(
    "asked", [("sink",), ("sink", "softcap"), ("q_pos", "k_pos"), ("dropout_state", "dropout_p"), ("split_size",)]
)
def test_autograd_carries_features(monkeypatch, asked):
    """Features reach both operators, and a sink's gradient comes back; stand-ins that know features replace these."""
    calls = {"forward": operator_calls._forward_operator, "backward": operator_calls._backward_operator}
    given, seen = {name: feature(name) for name in asked}, {}

    def instead(direction, tensors):
        def call(*arguments):
            end = tensors + 7
            seen[direction] = AttentionOptions(*arguments[tensors:])._asdict()
            results = calls[direction](*arguments[:end])
            return (*results[:3], torch.ones(4, device=DEVICE)) if direction == "backward" else results

        return call

    monkeypatch.setattr(operator_calls, "_forward_operator", instead("forward", 6))
    monkeypatch.setattr(operator_calls, "_backward_operator", instead("backward", 10))
    leaves = [x.requires_grad_() for x in inputs()]
    if "sink" in given:
        leaves.append(given["sink"].requires_grad_())
    out, _ = operators.forward(*leaves[:3], *PLAIN, **given)
    out.sum().backward()
    for got in seen.values():
        assert all(torch.equal(torch.as_tensor(got[name]), torch.as_tensor(given[name])) for name in asked)
    assert len(seen) == 2 and all(x.grad is not None for x in leaves)
    assert "sink" not in given or (given["sink"].grad == 1).all()


def test_a_sink_alone_may_require_a_gradient(monkeypatch):
    calls = []
    monkeypatch.setattr(operator_calls, "_apply_attention", lambda *arguments: calls.append(arguments) or arguments[:2])
    operators.forward(*inputs(), *PLAIN, sink=feature("sink").requires_grad_())
    assert len(calls) == 1


def test_without_a_sink_its_gradient_is_empty():
    q, k, v = inputs()
    out, lse = attend(q, k, v)
    *_, dsink = operators.backward(out, None, q, k, v, out, lse, *PLAIN)
    assert dsink.shape == (0,) and dsink.dtype == torch.float32 and dsink.device == DEVICE


# --- Strides ------------------------------------------------------------------------------------------


def bhsd(x):
    """Values of x, in memory as BHSD."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def off_boundaries(x):
    """Values of x, in rows that begin where CUDA's kernels cannot read them."""
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


def sbhd(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def last_first(x):
    return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def expanded(x):
    return x[:1, :1, :1, :1].expand(x.shape)


def rows_expanded(x):
    return x[:, :1].expand(x.shape)


def every_other(x):
    return torch.stack((x, x), -1)[..., 0]


GRADIENT_STRIDES = [bhsd, sbhd, off_boundaries, last_first, expanded, rows_expanded, every_other]


def backward_arguments(q, k, v):
    """Arguments of flashmask::backward without a mask, behind dout and dlse."""
    out, lse = attend(q, k, v)
    return q, k, v, out, lse, None, None, None, None, False, None, -1, -1, True, "auto"


@pytest.mark.parametrize("change", GRADIENT_STRIDES)
def test_gradients_of_any_strides(change):
    """Gradients of out and lse with any strides give the result of contiguous ones, bit for bit."""
    q, k, v = inputs()
    arguments = backward_arguments(q, k, v)
    dout, dlse = change(torch.randn_like(arguments[3])), change(torch.randn_like(arguments[4])[..., None])[..., 0]
    got = operators.backward(dout, dlse, *arguments)
    want = operators.backward(dout.contiguous(), dlse.contiguous(), *arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    torch.library.opcheck(operators.backward.default, (dout, dlse, *arguments))


PACKED = {
    "contiguous": lambda x: x,
    "bhsd": bhsd,
    "sbhd": sbhd,
    "packed": lambda x: torch.stack((x, x), 2)[:, :, 0],
    "packed bhsd": lambda x: torch.stack((x, x), 2).permute(0, 2, 3, 1, 4).contiguous()[:, 1].transpose(1, 2),
    "a slice of rows": lambda x: torch.cat((x, x), 1)[:, x.shape[1] :],
}


@pytest.mark.parametrize("layout", PACKED)
def test_gradients_lie_in_memory_as_their_inputs_do(layout):
    """Strides are torch.empty_like's, so that no gradient is copied on its way to a transposed parameter."""
    q, k, v = (PACKED[layout](x) for x in inputs())
    arguments = backward_arguments(q, k, v)
    dout = torch.randn_like(arguments[3])
    results = operators.backward(dout, None, *arguments)
    assert all(a.stride() == torch.empty_like(x).stride() for a, x in zip(results, (q, k, v)))
    want = operators.backward(dout, None, *backward_arguments(*(x.contiguous() for x in (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(results, want))
    torch.library.opcheck(operators.backward.default, (dout, None, *arguments))


@cpu_only("CUDA takes no expanded keys")
def test_gradients_of_expanded_keys_do_not_overlap():
    q, k, v = inputs(heads_kv=1)
    wide = [x.expand(-1, -1, 4, -1) for x in (k, v)]
    got = operators.backward(dout := torch.randn(2, 70, 4, 6), None, *backward_arguments(q, *wide))
    want = operators.backward(dout, None, *backward_arguments(q, *(x.contiguous() for x in wide)))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@cpu_only("a plan's size does not depend on the device")
@pytest.mark.parametrize("seqlen_q", [0, 1, 64, 65, 128, 129, 4000, 70000])
@pytest.mark.parametrize("seqlen_k", [0, 1, 128, 129, 8200])
@pytest.mark.parametrize("batch, heads", [(1, 1), (3, 5)])
def test_traced_plans_have_the_size_of_real_ones(seqlen_q, seqlen_k, batch, heads):
    def plan():
        return ops.plan(
            flashmask.Mask(
                seqlen_q, seqlen_k, causal=True, bounds=torch.zeros(batch, heads, seqlen_k, 1, dtype=torch.int32)
            )
        )

    with FakeTensorMode():
        traced = plan()
    assert traced.shape == plan().shape


def attend(q, k, v, *, mask=(None, None, None), backend="auto"):
    return operators.forward(q, k, v, *mask, None, False, None, -1, -1, False, backend)


def filled(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def plan_of(seqlen_q, seqlen_k):
    return operators.plan(None, None, seqlen_q, seqlen_k, False, None, -1, -1, DEVICE)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda q, k, v: attend(q[0], k, v), "query has 3 dimensions"),
        (lambda q, k, v: attend(q, k.double(), v), "k is float64"),
        (lambda q, k, v: attend(q, k[:, :, :1].expand(-1, -1, 3, -1), v), "q has 4 heads and k 3"),
        (
            lambda q, k, v: attend(q.mT.contiguous().mT, k, v),
            "q has stride 4 in its last dimension; it must be contiguous",
        ),
        (
            lambda q, k, v: attend(q, k, v.mT.contiguous().mT),
            "v has stride 2 in its last dimension; it must be contiguous",
        ),
        (lambda q, k, v: attend(q.long(), k, v), "query has a dtype"),
        (lambda q, k, v: attend(q, k, v, mask=(filled(2, 1, 90, 2), None, None)), "int32"),
        (lambda q, k, v: attend(q, k, v, mask=(filled(2, 3, 90, 2, dtype=torch.int32), None, None)), "3 heads"),
        (lambda q, k, v: attend(q, k, v, mask=(None, None, filled(3))), "plan must be what flashmask::plan returned"),
        (lambda q, k, v: attend(q, k, v, backend="tpu"), "backend 'tpu'"),
    ],
)
def test_wrong_arguments_are_value_errors(change, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        change(*inputs())


def test_a_plan_of_other_lengths_is_noticed():
    """On CUDA, where a plan is not read on the host, if it is too small."""
    with pytest.raises(
        ValueError, match="the buffer has .* bytes; its plan needs" if ON_CUDA else "plan was made for lengths"
    ):
        attend(*inputs(), mask=(None, None, plan_of(1, 1)))
    if not ON_CUDA:
        with pytest.raises(ValueError, match="plan was made for lengths"):
            attend(*inputs(), mask=(None, None, plan_of(70, 91)))


def test_what_no_backend_takes_says_so_and_why():
    cases = [
        (inputs(torch.float64), "float64 .*(reference|cast to bfloat16)"),
        (inputs(head_dim=300), "head_dim .* is 300; it must be between 1 and 256"),
    ]
    if ON_CUDA:
        cases += [
            (inputs(torch.float32), "float32 tensors are not taken; cast to bfloat16 or float16"),
            (
                [x[..., :60] for x in inputs(head_dim=64, head_dim_v=64)],
                r"head_dim 60 with head_dim_v 60 is not taken by the forward; it takes .*; the nearest is 64 / 64",
            ),
            (
                [filled(2, 70, 4, 100, dtype=torch.bfloat16) for _ in range(3)],
                r"head_dim 100 with head_dim_v 100 is not taken by the forward; it takes .*; the nearest is 128 / 128",
            ),
        ]
    for tensors, text in cases:
        for requires_grad in (False, True):
            with pytest.raises(flashmask.UnsupportedError, match=text):
                ops.attention(*(x.detach().requires_grad_(requires_grad) for x in tensors))
    assert issubclass(flashmask.UnsupportedError, NotImplementedError)


def test_a_backward_that_no_backend_takes_says_so_and_why(monkeypatch):
    """The error is raised in backward(), with the text of the library."""
    q, k, v = (x.requires_grad_() for x in inputs())
    out, _ = ops.attention(q, k, v)

    def refused(*arguments):
        raise RuntimeError("UnsupportedError: no backend takes this call")

    monkeypatch.setattr(operator_calls, "_backward_operator", refused)
    with pytest.raises(flashmask.UnsupportedError, match="^no backend takes this call"):
        out.sum().backward()
    assert q.grad is None


def test_second_derivatives_are_refused():
    q, k, v = (x.requires_grad_() for x in inputs())
    (dq,) = torch.autograd.grad(ops.attention(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(flashmask.UnsupportedError, match="second derivatives"):
        dq.sum().backward()


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_import_touches_neither_torch_nor_cuda():
    run = python(
        "import sys, flashmask; assert 'torch' not in sys.modules; "
        "flashmask.flashmask_attention, flashmask.masks.causal; "
        "import torch; assert not torch.cuda.is_initialized(); assert 'flashmask_attention' in dir(flashmask)"
    )
    assert run.returncode == 0, run.stderr


def test_without_torch_the_c_interface_works_and_the_rest_says_what_to_install():
    run = python(
        "import sys; sys.modules['torch'] = None; import flashmask.capi; "
        "assert flashmask.capi.load().fm_version(); flashmask.Mask"
    )
    assert run.returncode != 0 and "pip install torch" in run.stderr


def test_a_missing_library_is_named():
    run = python("import flashmask; flashmask.ops", FLASHMASK_TORCH_LIBRARY="/nowhere/libflashmask_torch.so")
    assert run.returncode != 0 and "ImportError: /nowhere/libflashmask_torch.so is not there" in run.stderr


def test_an_old_torch_is_refused():
    from flashmask.torch import library

    library.check_torch("2.10.0")
    library.check_torch("3.0.0a0+git123")
    with pytest.raises(ImportError, match="2.10 or later; this is 2.9.1"):
        library.check_torch("2.9.1")
