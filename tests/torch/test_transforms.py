# SPDX-License-Identifier: Apache-2.0
"""torch.export carries a call away; torch.func maps one, and cannot differentiate it, which it says."""

import io
import warnings

import flashmask
import pytest
import torch
from devices import DEVICE, DTYPE, head_dims
from flashmask import UnsupportedError, flashmask_attention, masks
from torch.autograd import forward_ad


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
    """Saves a program to a file and loads it again."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def test_export_takes_any_length_and_is_saved():
    length = torch.export.Dim("length", min=2, max=4096)
    program = exported(
        attend,
        (*tensors(20), bounds_of(20)),
        dynamic_shapes={"inputs": ({1: length}, {1: length}, {1: length}, {2: length})},
    )
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


def mapped_tensors(*lead):
    return [torch.randn(*lead, 20, 2, *head_dims(16), device=DEVICE, dtype=DTYPE) for _ in range(3)]


def mapped_bounds(*lead):
    return torch.randint(0, 21, (*lead, 1, 20, 1), dtype=torch.int32).to(DEVICE)


def mapped_blocks(*lead):
    return (torch.rand(*lead, 1, 1, 1) < 0.5).to(DEVICE)


def with_blocks(q, k, v, bounds, block_mask):
    return flashmask_attention(q, k, v, bounds, causal=True, block_mask=block_mask)


SHARED = masks.causal(20)


def shared_mask(q, k, v):
    return flashmask_attention(q, k, v, SHARED)


# The mapped function, its tensors and the dimension that each is mapped along: 3 calls of a batch of 2.
MAPPED = {
    "a mask for all": lambda: (shared_mask, mapped_tensors(3, 2), (0, 0, 0)),
    "queries alone": lambda: (shared_mask, [mapped_tensors(3, 2)[0], *mapped_tensors(2)[1:]], (0, None, None)),
    "other dimensions": lambda: (
        shared_mask,
        [x.movedim(0, d) for x, d in zip(mapped_tensors(3, 2), (1, 2, -1))],
        (1, 2, -1),
    ),
    "bounds for all": lambda: (attend, [*mapped_tensors(3, 2), mapped_bounds(1)], (0, 0, 0, None)),
    "bounds for each of the batch": lambda: (attend, [*mapped_tensors(3, 2), mapped_bounds(2)], (0, 0, 0, None)),
    "bounds for each call": lambda: (attend, [*mapped_tensors(3, 2), mapped_bounds(3, 1)], (0, 0, 0, 0)),
    "bounds for each of both": lambda: (attend, [*mapped_tensors(3, 2), mapped_bounds(3, 2)], (0, 0, 0, 0)),
    "bounds alone": lambda: (attend, [*mapped_tensors(2), mapped_bounds(3, 2)], (None, None, None, 0)),
    "blocks": lambda: (with_blocks, [*mapped_tensors(3, 2), mapped_bounds(2), mapped_blocks(3, 1)], (0, 0, 0, None, 0)),
}


@pytest.mark.parametrize("what", MAPPED)
def test_vmap_is_one_call_after_the_other(what, capfd):
    """Torch does not print its warning of a missing batching rule, either."""
    function, inputs, dims = MAPPED[what]()
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.func.vmap(function, dims)(*inputs)
    assert capfd.readouterr() == ("", "")
    for n in range(3):
        want = function(*(x if d is None else x.select(d, n).contiguous() for x, d in zip(inputs, dims)))
        assert torch.equal(got[n], want)


def test_vmap_within_vmap():
    inputs, mask = mapped_tensors(3, 2), masks.causal_document(seqlens=[5, 15], device=DEVICE)
    alone = lambda q, k, v: flashmask_attention(q[None], k[None], v[None], mask)[0]
    mapped = torch.func.vmap(torch.func.vmap(alone))(*inputs)
    assert torch.equal(mapped.flatten(0, 1), flashmask_attention(*(x.flatten(0, 1) for x in inputs), mask))


def test_gradients_of_what_vmap_maps():
    """Checks gradients by autograd, from outside of vmap."""
    leaves = [x.requires_grad_() for x in mapped_tensors(3, 2)]
    dout = torch.randn(3, 2, 20, 2, *head_dims(16), device=DEVICE, dtype=DTYPE)
    call = lambda q, k, v: flashmask_attention(q, k, v, causal=True, deterministic=True)
    got = torch.autograd.grad(torch.func.vmap(call)(*leaves), leaves, dout)
    want = torch.autograd.grad(call(*(x.flatten(0, 1) for x in leaves)), leaves, dout.flatten(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.func.vmap(lambda z: f(z[None]))(y).sum())(x),
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
    with pytest.raises(UnsupportedError, match="derivatives in forward mode"):
        mapped = torch.func.vmap(lambda x: call(x[None].expand(2, -1, -1, -1)))
        torch.func.jvp(mapped, (inputs[argument],), (inputs[argument],))
    with forward_ad.dual_level():
        call(inputs[argument])  # without a tangent there is nothing to lose
        with pytest.raises(UnsupportedError, match="derivatives in forward mode"):
            call(forward_ad.make_dual(inputs[argument], torch.ones_like(inputs[argument])))


@pytest.mark.parametrize("argument", range(3))
def test_derivatives_in_forward_mode_are_refused_with_those_in_reverse(argument):
    """Tensors require gradients, as parameters do."""
    inputs = [x.requires_grad_() for x in tensors()]
    with forward_ad.dual_level():
        duals = list(inputs)
        duals[argument] = forward_ad.make_dual(inputs[argument], torch.ones_like(inputs[argument]))
        with pytest.raises(UnsupportedError, match="derivatives in forward mode"):
            flashmask_attention(*duals, causal=True)
        flashmask_attention(*inputs, causal=True).sum().backward()
