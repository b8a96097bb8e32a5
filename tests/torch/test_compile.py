# SPDX-License-Identifier: Apache-2.0
"""torch.compile: one graph, forward and backward, that neither another mask nor another length compiles anew."""

import functools

import flashmask
import pytest
import torch
import torch._dynamo.testing
from devices import DEVICE, DTYPE, ON_CUDA, head_dims
from flashmask import flashmask_attention


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    # A recompilation is an error, so that no test has to count.
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def tensors(length):
    return [
        torch.randn(2, length, heads, *head_dims(16), device=DEVICE, dtype=DTYPE, requires_grad=True)
        for heads in (4, 2, 2)
    ]


def random_bounds(length):
    return torch.randint(0, length + 1, (2, 1, length, 1), dtype=torch.int32, device=DEVICE)


# Deterministic, or on CUDA two runs could differ in what the second layer's gradient hands to the first.
attend = functools.partial(flashmask_attention, deterministic=True)


def raw(q, k, v, bounds):
    return attend(q, k, v, bounds, causal=True, return_softmax_lse=True)


def two_layers(q, k, v, mask):
    return attend(attend(q, k, v, mask), k, v, mask, return_softmax_lse=True)


def own_mask(q, k, v, bounds):
    mask = flashmask.Mask(q.shape[1], k.shape[1], bounds=bounds, causal=True, window=(30, 0))
    return two_layers(q, k, v, mask)


def transposed(q, k, v, bounds):
    out, lse = attend(
        *(x.transpose(1, 2) for x in (q, k, v)), bounds, causal=True, layout="bhsd", return_softmax_lse=True
    )
    return out.transpose(1, 2).relu(), lse


def bhsd_in_memory(q, k, v, bounds):
    """Its gradients are transposed views, as its inputs are."""
    return transposed(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), bounds)


def expanded_inside(q, k, v, bounds):
    """The gradient of out is made in the graph, by a sum, and has no strides of its own."""
    out, lse = raw(q, k, v, bounds)
    return out.sum((1, 3)), lse


def mask_of(length):
    return flashmask.Mask(length, length, bounds=random_bounds(length), causal=True)


def band_of(length):
    return flashmask.Mask(length, length, causal=True, window=(10, 0))


def results(function, inputs, mask):
    """out, and gradients through out and lse."""
    out, lse = function(*inputs, mask)
    loss = out.square().sum() + lse.masked_fill(torch.isinf(lse), 0).sum()
    return (out, *torch.autograd.grad(loss, inputs))


def check(function, make_mask, lengths, mark=None, **options):
    compiled = torch.compile(function, fullgraph=True, **options)
    for length in lengths:
        inputs, mask = tensors(length), make_mask(length)
        if mark:
            mark(inputs, mask)
        for got, want in zip(results(compiled, inputs, mask), results(function, inputs, mask)):
            torch.testing.assert_close(got, want)


FUNCTIONS = [
    (raw, random_bounds),
    (two_layers, mask_of),
    (two_layers, band_of),
    (own_mask, random_bounds),
    (transposed, random_bounds),
    (bhsd_in_memory, random_bounds),
    (expanded_inside, random_bounds),
]


@pytest.mark.parametrize("function, make_mask", FUNCTIONS)
def test_another_mask_of_the_same_length(function, make_mask):
    check(function, make_mask, [100, 100, 100], backend="aot_eager")


@pytest.mark.parametrize("function, make_mask", FUNCTIONS)
def test_another_length(function, make_mask):
    check(function, make_mask, [100, 140, 300, 64], backend="aot_eager", dynamic=True)


def test_documents_of_new_lengths_at_the_same_total():
    """Nothing is compiled anew: neither of a mask from outside, of any number of documents, nor of cu_seqlens."""
    compiled = torch.compile(two_layers, fullgraph=True, backend="aot_eager")
    for lengths in ([100], [30, 70], [1, 0, 98, 1], [20] * 5):
        inputs, mask = tensors(100), flashmask.masks.causal_document(seqlens=lengths, device=DEVICE)
        for got, want in zip(results(compiled, inputs, mask), results(two_layers, inputs, mask)):
            torch.testing.assert_close(got, want)

    def packed(q, k, v, cu_seqlens):
        return flashmask.flashmask_varlen_func(
            q[0], k[0], v[0], cu_seqlens, cu_seqlens, causal=True, deterministic=True, return_softmax_lse=True
        )

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for lengths in ([30, 60, 10], [0, 99, 1], [50, 50, 0]):
        inputs, cu_seqlens = tensors(100), torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        for got, want in zip(results(compiled, inputs, cu_seqlens), results(packed, inputs, cu_seqlens)):
            torch.testing.assert_close(got, want)


def test_the_first_new_length_is_compiled_once_and_no_other():
    """Torch treats any operator so: the first length is taken for a constant, from the second on it may be any."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(two_layers, fullgraph=True, backend=counter)
    counts = []
    with torch._dynamo.config.patch(error_on_recompile=False):
        for length in (100, 140, 300, 64):
            inputs, mask = tensors(length), mask_of(length)
            for got, want in zip(results(compiled, inputs, mask), results(two_layers, inputs, mask)):
                torch.testing.assert_close(got, want)
            counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]


def test_a_recompilation_would_be_noticed():
    with pytest.raises(torch._dynamo.exc.RecompileError):
        check(raw, random_bounds, [100, 140], backend="aot_eager", dynamic=False)


def test_marked_lengths():
    def mark(inputs, bounds):
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(bounds, 2)

    check(raw, random_bounds, [100, 140, 300], mark, backend="aot_eager")


def test_inductor():
    check(two_layers, mask_of, [100, 100])


@pytest.mark.parametrize("function", [pytest.param(transposed, marks=pytest.mark.long), bhsd_in_memory])
def test_inductor_with_another_length(function):
    check(function, random_bounds, [100, 300], dynamic=True)


def test_autocast_and_checkpoint_inside():
    def function(q, k, v, bounds):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(raw, q, k, v, bounds, use_reentrant=False)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs, bounds = tensors(100), random_bounds(100)
    for got, want in zip(results(compiled, inputs, bounds), results(function, inputs, bounds)):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(not ON_CUDA, reason="graphs of CUDA calls")
def test_graphs_of_compiled_code():
    """mode="reduce-overhead": both directions are compiled, captured, and replayed with other tensors and masks."""
    compiled = torch.compile(two_layers, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        inputs, mask = tensors(100), mask_of(100)
        torch.compiler.cudagraph_mark_step_begin()
        for got, want in zip([x.clone() for x in results(compiled, inputs, mask)], results(two_layers, inputs, mask)):
            torch.testing.assert_close(got, want)


def test_inference():
    compiled = torch.compile(raw, fullgraph=True, backend="aot_eager")
    inputs, bounds = tensors(100), random_bounds(100)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs, bounds)[0], raw(*inputs, bounds)[0])
