# SPDX-License-Identifier: Apache-2.0
"""Streams, graphs and several devices. Needs FLASHMASK_TEST_DEVICE=cuda."""

import pytest
import torch
from cuda_checks import FORWARD, assert_runs, bounds_of, tensors
from devices import DEVICE, cuda_only
from flashmask import flashmask_attention, masks
from flashmask.torch import operators
from flashmask.torch.mask import Mask
from test_attention import S

pytestmark = cuda_only

# --- Streams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_plan", [False, True])
def test_a_side_stream(with_plan):
    """All work is on the current stream, behind what was there before, and the host waits for none of it."""
    inputs, bounds = tensors(), bounds_of()
    late, late_bounds = [torch.zeros_like(x) for x in inputs], torch.zeros_like(bounds)
    ready = Mask(S, S, bounds=bounds, causal=True)
    want = flashmask_attention(*inputs, ready)
    stream = torch.cuda.Stream()

    def late_call():
        for to, source in zip((*late, late_bounds), (*inputs, bounds)):
            to.copy_(source)
        return flashmask_attention(*late, ready if with_plan else Mask(S, S, bounds=late_bounds, causal=True))

    with torch.cuda.stream(stream):
        late_call()  # gets the stream its memory
        for x in (*late, late_bounds):
            x.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(500_000_000)  # about a quarter of a second
        out = late_call()
        waiting = not stream.query()
    assert waiting
    stream.synchronize()
    assert torch.equal(out, want)


def both(inputs, mask, dout, **arguments):
    """out and the gradients of the inputs, deterministic."""
    out = flashmask_attention(*inputs, mask, deterministic=True, **arguments)
    return out, *torch.autograd.grad(out, inputs, dout)


def test_a_side_stream_of_gradients():
    """Forward and backward wait for what was on the stream before, and the host for neither."""
    inputs, mask = [x.requires_grad_() for x in tensors()], Mask(S, S, bounds=bounds_of(), causal=True)
    dout = torch.randn_like(inputs[0])
    want = both(inputs, mask, dout)
    late = [torch.zeros_like(x).requires_grad_(x.requires_grad) for x in (*inputs, dout)]
    stream = torch.cuda.Stream()

    def late_call():
        with torch.no_grad():
            for to, source in zip(late, (*inputs, dout)):
                to.copy_(source)
        return both(late[:3], mask, late[3])

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late_call()  # gets the stream its memory
        with torch.no_grad():
            for x in late:
                x.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(500_000_000)  # about a quarter of a second
        got = late_call()
        waiting = not stream.query()
    assert waiting
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_two_streams_at_once():
    """Calls of two streams share nothing, neither workspace nor outputs nor gradients."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    problems = [
        (
            [x.requires_grad_() for x in tensors(batch=4, seqlen_q=1024, seqlen_k=1024)],
            Mask(1024, 1024, bounds=bounds_of(1024), causal=True),
        )
        for _ in streams
    ]
    dout = torch.randn_like(problems[0][0][0])
    want = [both(*problem, dout) for problem in problems]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(10):
        for stream, problem, made in zip(streams, problems, results):
            with torch.cuda.stream(stream):
                made.append(both(*problem, dout))
    torch.cuda.synchronize()
    assert all(
        torch.equal(a, b) for made, expected in zip(results, want) for run in made for a, b in zip(run, expected)
    )


# --- Graphs -------------------------------------------------------------------------------------------


def captured(call):
    """(graph, what the call returned in it)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("as_mask", [False, True])
def test_a_graph_makes_its_plan(as_mask):
    """A replay follows the contents of the inputs and of the mask, a tensor or a Mask."""
    inputs, bounds = tensors(), bounds_of()
    mask = Mask(S, S, bounds=bounds, causal=True)
    arguments = {} if as_mask else {"causal": True}
    graph, (out, lse) = captured(
        lambda: flashmask_attention(*inputs, mask if as_mask else bounds, return_softmax_lse=True, **arguments)
    )
    for _ in range(3):
        for x in inputs:
            x.normal_()
        bounds.copy_(bounds_of())
        graph.replay()
        want, want_lse = flashmask_attention(*inputs, bounds, causal=True, return_softmax_lse=True)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("expanded", [False, True])
def test_a_graph_of_forward_and_backward(expanded):
    """A replay follows the contents of the inputs, the mask and the gradient, also of one that is copied within."""
    inputs, bounds = [x.requires_grad_() for x in tensors()], bounds_of()
    values = torch.randn(2, S, 4, 1 if expanded else 64, device=DEVICE, dtype=torch.bfloat16)
    dout = values.expand(-1, -1, -1, 64)
    call = lambda: both(inputs, bounds, dout, causal=True)
    graph, got = captured(call)
    for _ in range(3):
        with torch.no_grad():
            for x in (*inputs, values):
                x.normal_()
        bounds.copy_(bounds_of())
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, call()))


def test_a_replayed_graph_drops_anew():
    """The state is drawn inside the graph."""
    inputs = tensors()
    graph, out = captured(lambda: flashmask_attention(*inputs, causal=True, dropout=0.5))
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(out.clone())
    assert not any(torch.equal(a, b) for a, b in zip(seen, seen[1:]))


def test_graphed_callables():
    """torch.cuda.make_graphed_callables: forward and backward are graphs of their own, between which the plan goes."""
    inputs, bounds = [x.requires_grad_() for x in tensors()], bounds_of()
    call = lambda *x: flashmask_attention(*x, causal=True, deterministic=True)
    graphed = torch.cuda.make_graphed_callables(
        call, (*(x.detach().clone().requires_grad_() for x in inputs), bounds.clone())
    )
    for _ in range(3):
        with torch.no_grad():
            for x in inputs:
                x.normal_()
        bounds = bounds_of()
        dout = torch.randn_like(inputs[0])
        out = graphed(*inputs, bounds)
        got = [x.clone() for x in (out, *torch.autograd.grad(out, inputs, dout))]
        assert all(torch.equal(a, b) for a, b in zip(got, both(inputs, bounds, dout, causal=True)))


def test_a_graph_with_a_plan_from_outside():
    """Through the operator; then the graph is the one kernel, and the mask has to stay as it is."""
    inputs = tensors()
    mask = Mask(S, S, bounds=bounds_of(), causal=True)
    bounds, block_mask, *band = operators.mask_arguments(mask)
    plan = mask.plan()
    graph, (out, _) = captured(
        lambda: torch.ops.flashmask.forward(*inputs, bounds, block_mask, plan, None, *band, False, "auto")
    )
    for _ in range(3):
        for x in inputs:
            x.normal_()
        graph.replay()
        assert torch.equal(out, flashmask_attention(*inputs, mask))
    assert_runs(graph.replay, FORWARD)


def test_a_plan_of_a_graph_is_not_kept():
    """Its memory is the graph's; the Mask makes itself another one."""
    inputs, bounds = tensors(), bounds_of()
    mask = Mask(S, S, bounds=bounds, causal=True)
    graph = torch.cuda.CUDAGraph()
    flashmask_attention(*inputs, bounds, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        flashmask_attention(*inputs, mask)
    assert not mask._plans
    assert torch.equal(flashmask_attention(*inputs, mask), flashmask_attention(*inputs, bounds, causal=True))


# --- Several devices ----------------------------------------------------------------------------------

several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@several
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_device_that_is_not_the_current_one(requires_grad):
    inputs, bounds = tensors(), bounds_of()
    want = flashmask_attention(*inputs, bounds, causal=True, return_softmax_lse=True)
    there = [x.to("cuda:1").requires_grad_(requires_grad) for x in inputs]
    with torch.cuda.device(0):
        got = flashmask_attention(*there, bounds.to("cuda:1"), causal=True, return_softmax_lse=True)
        again = flashmask_attention(*there, masks.causal(S), return_softmax_lse=True)
        assert torch.cuda.current_device() == 0
    for result in (*got, *again):
        assert result.device == torch.device("cuda", 1)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want))
    assert torch.equal(again[0].cpu(), flashmask_attention(*inputs, masks.causal(S)).cpu())


@several
def test_gradients_on_a_device_that_is_not_the_current_one():
    inputs, bounds = [x.requires_grad_() for x in tensors()], bounds_of()
    dout = torch.randn_like(inputs[0])
    want = both(inputs, bounds, dout, causal=True)
    there = [x.detach().to("cuda:1").requires_grad_() for x in inputs]
    with torch.cuda.device(0):
        got = both(there, bounds.to("cuda:1"), dout.to("cuda:1"), causal=True)
        assert torch.cuda.current_device() == 0
    assert all(a.device == torch.device("cuda", 1) and torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want))


@several
def test_a_side_stream_of_another_device():
    inputs = [x.to("cuda:1") for x in tensors()]
    mask = Mask(S, S, bounds=bounds_of().to("cuda:1"), causal=True)
    want = flashmask_attention(*inputs, mask)
    late = [torch.zeros_like(x) for x in inputs]
    stream = torch.cuda.Stream(device=1)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        with torch.cuda.device(1):
            torch.cuda._sleep(200_000_000)
        for to, source in zip(late, inputs):
            to.copy_(source)
        out = flashmask_attention(*late, mask)
    stream.synchronize()
    assert torch.equal(out, want)


@several
def test_tensors_of_two_devices_are_named():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="key is on cuda:1 and query on cuda:0"):
        flashmask_attention(q, k.to("cuda:1"), v)
    with pytest.raises(ValueError, match="the mask is on cuda:1 and its plan was asked for on cuda:0"):
        flashmask_attention(q, k, v, bounds_of().to("cuda:1"), causal=True)


def test_tensors_in_host_memory_are_named():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=f"key is on cpu and query on {DEVICE}"):
        flashmask_attention(q, k.cpu(), v)
    with pytest.raises(
        ValueError, match=f"the mask is on cpu and its plan was asked for on {DEVICE}; move the mask first"
    ):
        flashmask_attention(q, k, v, bounds_of().cpu(), causal=True)
