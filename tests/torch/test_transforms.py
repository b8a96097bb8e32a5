# SPDX-License-Identifier: Apache-2.0
"""torch.export carries a call away; torch.func maps one, and refuses to differentiate it."""

import io

import pytest
import torch
from devices import DEVICE, DTYPE, head_dims
from torch.autograd import forward_ad

import flashmask
from flashmask import UnsupportedError, flashmask_attention, masks


def tensors(length=20, batch=2):
    return [torch.randn(batch, length, 2, *head_dims(16), device=DEVICE, dtype=DTYPE) for _ in range(3)]


def bounds_of(length):
    return torch.randint(0, length + 1, (1, 1, length, 1), dtype=torch.int32).to(DEVICE)


def attend(q, k, v, bounds):
    return flashmask_attention(q, k, v, bounds, causal=True)


def attend_with_mask(q, k, v, mask):
    return flashmask_attention(q, k, v, mask)


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def exported(function, inputs, **options):
    return torch.export.export(Module(function), inputs, **options)


def loaded_again(program):
    """What is read from the file that the program is saved to."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def test_export_takes_any_length_and_is_saved():
    length = torch.export.Dim("length", min=2, max=4096)
    program = exported(attend, (*tensors(20), bounds_of(20)), dynamic_shapes={"inputs": ({1: length}, {1: length}, {1: length}, {2: length})})
    again = loaded_again(program)
    for n in (33, 200):
        inputs = (*tensors(n), bounds_of(n))
        want = attend(*inputs)
        assert torch.equal(program.module()(*inputs), want) and torch.equal(again.module()(*inputs), want)
    called = [str(node.target) for node in program.graph.nodes if "flashmask" in str(node.target)]
    assert called == ["flashmask.plan.default", "flashmask.forward.default"]


def test_export_with_a_mask():
    program = exported(attend_with_mask, (*tensors(), masks.causal_document(seqlens=[5, 15], device=DEVICE)))
    for lengths in ([20], [3, 4, 13]):
        inputs = (*tensors(), masks.causal_document(seqlens=lengths, device=DEVICE))
        assert torch.equal(program.module()(*inputs), attend_with_mask(*inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_runs_one_call_after_the_other():
    q, k, v = tensors(batch=3)
    mask = masks.causal(20)
    mapped = torch.func.vmap(lambda q, k, v: flashmask_attention(q[None], k[None], v[None], mask)[0])
    assert torch.equal(mapped(q, k, v), flashmask_attention(q, k, v, mask))


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "per sample": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y[None]).sum()))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_of_torch_func_are_refused(transform):
    q, k, v = tensors()
    mask = masks.causal(20)
    with pytest.raises(UnsupportedError, match="torch.func cannot differentiate"):
        TRANSFORMS[transform](lambda x: flashmask_attention(x, k[: x.shape[0]], v[: x.shape[0]], mask), q)


@pytest.mark.parametrize("argument", range(3))
def test_derivatives_in_forward_mode_are_refused(argument):
    """Rather than being 0."""
    inputs = tensors()

    def call(x):
        return flashmask.flashmask_attention(*inputs[:argument], x, *inputs[argument + 1 :], causal=True)

    with pytest.raises(UnsupportedError, match="derivatives in forward mode"):
        torch.func.jvp(call, (inputs[argument],), (inputs[argument],))
    with forward_ad.dual_level():
        call(inputs[argument])  # without a tangent there is nothing to lose
        with pytest.raises(UnsupportedError, match="derivatives in forward mode"):
            call(forward_ad.make_dual(inputs[argument], torch.ones_like(inputs[argument])))
