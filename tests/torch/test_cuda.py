# SPDX-License-Identifier: Apache-2.0
"""What only CUDA tensors can show: what runs on the device, streams, graphs, several devices, refusals, masks there.

Needs FLASHMASK_TEST_DEVICE=cuda.
"""

import random

import flashmask
import pytest
import torch
from devices import DEVICE, cuda_only
from flashmask import UnrepresentableMaskError, UnsupportedError, flashmask_attention, masks, ops
from flashmask.mask import Mask
from test_attention import FAMILIES, S, tensors
from test_mask import draw_mask
from test_masks import LISTS, TRACED
from torch.autograd import DeviceType

pytestmark = cuda_only
FORWARD = ["_fwd_"]
BACKWARD = ["_preprocess", "_bwd_", "_convert_dq"]
# Of grouped heads, as tensors() has them, with so little work that items share a key head's query heads.
GROUPED_BACKWARD = [*BACKWARD, "_reduce_dkv"]
PLAN = ["plan_classify", "plan_transpose", "plan_rank"]


# --- What runs on the device --------------------------------------------------------------------------


def profiled(call):
    """(kernels, copies and fills in their order, names of what the host asked of CUDA's runtime) of one call."""
    for _ in range(2):  # the first profile of a process may miss events
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            call()
            torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    device = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return device, [
        event.name for event in events if event.device_type == DeviceType.CPU and event.name.startswith("cu")
    ]


def assert_runs(call, expected):
    """On the device exactly these, a word of each name; no copy anywhere, and the host waits for nothing."""
    device, host = profiled(call)
    assert len(device) == len(expected) and all(word in name for word, name in zip(expected, device)), (
        expected,
        device,
    )
    waits = [name for name in host if "Memcpy" in name or "Synchronize" in name and name != "cudaDeviceSynchronize"]
    assert not waits and host.count("cudaDeviceSynchronize") <= 2, host  # profiled's own, and perhaps the profiler's


def bounds_of(seqlen=S):
    return torch.randint(0, seqlen + 1, (1, 1, seqlen, 1), dtype=torch.int32).to(DEVICE)


LAYOUTS = {
    "bshd": lambda: (tensors(), "bshd"),
    "bhsd": lambda: ([x.transpose(1, 2).contiguous() for x in tensors()], "bhsd"),
    "bshd, qkv packed": lambda: (torch.randn(2, S, 3, 4, 64, dtype=torch.bfloat16, device=DEVICE).unbind(2), "bshd"),
    "bhsd, qkv packed": lambda: (torch.randn(2, 4, 3, S, 64, dtype=torch.bfloat16, device=DEVICE).unbind(2), "bhsd"),
    "bshd, heads packed": lambda: (torch.randn(2, S, 4, 3, 64, dtype=torch.bfloat16, device=DEVICE).unbind(3), "bshd"),
    "a slice of rows": lambda: ([x[:, 8:] for x in tensors(seqlen_q=S + 8, seqlen_k=S + 8)], "bshd"),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_with_a_plan_is_one_kernel(layout, requires_grad):
    """Nothing is copied on the way in or out."""
    inputs, name = LAYOUTS[layout]()
    inputs = [x.detach().requires_grad_(requires_grad) for x in inputs]
    mask = Mask(S, S, bounds=bounds_of(), causal=True)
    mask.plan()
    assert_runs(lambda: flashmask_attention(*inputs, mask, layout=name), FORWARD)


def with_graph(inputs, mask, layout="bshd"):
    """(leaves, out, lse) of a call whose gradients can be asked for."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return leaves, *flashmask_attention(*leaves, mask, layout=layout, return_softmax_lse=True, deterministic=True)


@pytest.mark.parametrize("use_lse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_is_three_kernels_or_four(layout, use_lse):
    """Nothing is copied or filled, and the plan is the forward's."""
    inputs, name = LAYOUTS[layout]()
    leaves, out, lse = with_graph(inputs, Mask(S, S, bounds=bounds_of(), causal=True), name)
    outputs = (out, lse) if use_lse else (out,)
    gradients = [torch.randn_like(x) for x in outputs]
    assert_runs(
        lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True),
        GROUPED_BACKWARD if inputs[0].shape != inputs[1].shape else BACKWARD,
    )


GRADIENTS_IN_PLACE = {
    "bhsd in memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of heads": lambda x: torch.cat((x, x), 2)[:, :, : x.shape[2]],
    "rows off by a multiple of 16 bytes": lambda x: torch.nn.functional.pad(x, (8, 0))[..., 8:],
}
GRADIENTS_COPIED = {
    "expanded": lambda x: x[:1, :1, :1, :1].expand(x.shape),
    "rows expanded": lambda x: x[:, :1].expand(x.shape),
    "rows off boundaries": lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
    "every other": lambda x: torch.stack((x, x), -1)[..., 0],
}


@pytest.mark.parametrize("strides", [*GRADIENTS_IN_PLACE, *GRADIENTS_COPIED])
def test_a_gradient_is_copied_once_if_the_kernels_cannot_read_it(strides):
    leaves, out, _ = with_graph(tensors(), Mask(S, S, bounds=bounds_of(), causal=True))
    dout = {**GRADIENTS_IN_PLACE, **GRADIENTS_COPIED}[strides](torch.randn_like(out))
    call = lambda gradient: torch.autograd.grad(out, leaves, gradient, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(call(dout), call(dout.contiguous())))
    assert_runs(lambda: call(dout), (["copy"] if strides in GRADIENTS_COPIED else []) + GROUPED_BACKWARD)


def test_a_single_key_tile_leaves_no_sums_to_convert():
    leaves, out, _ = with_graph(tensors(seqlen_k=128), Mask(S, 128, causal=True))
    dout = torch.randn_like(out)
    expected = [name for name in GROUPED_BACKWARD if name != "_convert_dq"]
    assert_runs(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), expected)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_parameters_keep_their_gradients_without_a_copy(layout):
    inputs, name = LAYOUTS[layout]()
    leaves, out, _ = with_graph(inputs, Mask(S, S, bounds=bounds_of(), causal=True), name)
    dout = torch.randn_like(out)

    def call():
        for x in leaves:
            x.grad = None
        out.backward(dout, retain_graph=True)

    assert_runs(call, GROUPED_BACKWARD)


def test_a_gradient_of_lse_alone_fills_that_of_out():
    leaves, _, lse = with_graph(tensors(), Mask(S, S, bounds=bounds_of(), causal=True))
    dlse = torch.randn_like(lse)
    device, _ = profiled(lambda: torch.autograd.grad(lse, leaves, dlse, retain_graph=True))
    assert len(device) == 5 and all(word in name for word, name in zip(GROUPED_BACKWARD, device[1:])), device


def test_many_items_are_counted_down_from_a_fill():
    inputs = tensors(batch=8, seqlen_q=1024, seqlen_k=1024)
    mask = Mask(1024, 1024, bounds=bounds_of(1024), causal=True)
    mask.plan()
    assert_runs(lambda: flashmask_attention(*inputs, mask), ["Memset", *FORWARD])


def test_a_plan_is_three_kernels():
    inputs, bounds = tensors(), bounds_of()
    assert_runs(lambda: flashmask_attention(*inputs, bounds, causal=True), PLAN + FORWARD)
    assert_runs(lambda: ops.plan(Mask(S, S, bounds=bounds, causal=True)), PLAN)


def test_layouts_give_the_same_bits():
    q, k, v = tensors()
    mask = Mask(S, S, bounds=bounds_of(), causal=True)
    want = flashmask_attention(q, k, v, mask)
    bhsd = flashmask_attention(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), mask, layout="bhsd")
    packed = torch.cat((q, k, v), 2)
    slices = flashmask_attention(*packed.split((q.shape[2], k.shape[2], v.shape[2]), 2), mask)
    assert torch.equal(bhsd.transpose(1, 2), want) and torch.equal(slices, want)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_calls_leave_no_memory_behind(requires_grad):
    inputs, bounds = [x.requires_grad_(requires_grad) for x in tensors()], bounds_of()
    before = None
    for _ in range(20):
        out = flashmask_attention(*inputs, bounds, causal=True)
        if requires_grad:
            torch.autograd.grad(out.sum(), inputs)
        del out
        before = torch.cuda.memory_allocated(DEVICE) if before is None else before
    assert torch.cuda.memory_allocated(DEVICE) == before


@pytest.fixture
def little_memory():
    """64 MiB more than this process has."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + (64 << 20)) / total, DEVICE)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_what_lacks_memory_is_torchs_error(little_memory):
    """It says which tensor and how much, and the next call that fits runs."""
    q = torch.randn(1, 1, 1, 64, dtype=torch.bfloat16, device=DEVICE).expand(1, 65536, 32, 64)
    text = rf"CUDA out of memory: out \[1, 65536, 32, 64\] needs 268435456 bytes on {DEVICE}"
    with pytest.raises(torch.OutOfMemoryError, match=f"^{text}"):
        flashmask_attention(q, q, q)
    with pytest.raises(RuntimeError, match=f"OutOfMemoryError: {text}"):
        torch.ops.flashmask.forward(q, q, q, None, None, None, None, False, None, -1, -1, False, "auto")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory: the plan "):
        masks.causal(1 << 21).plan(DEVICE)
    assert flashmask_attention(*tensors(), causal=True).isfinite().all()


def test_few_ctas_give_the_same_bits():
    leaves, results = [x.requires_grad_() for x in tensors()], []
    for max_ctas in (0, 1, 5):
        out = flashmask_attention(*leaves, causal=True, deterministic=True, max_ctas=max_ctas)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


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
    """Of a tensor or a Mask: a replay follows the contents of both the inputs and the mask."""
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
    bounds, block_mask, *band = ops.mask_arguments(mask)
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


# --- What the kernels do not take ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, text",
    [
        (
            lambda q, k, v: (q[:1].expand(2, -1, -1, -1), k, v),
            r"q is expanded \(stride 0\) in dimension 0; make it contiguous",
        ),
        (
            lambda q, k, v: (q, torch.nn.functional.pad(k, (0, 4))[..., :64], v),
            "k has stride 68 in dimension 2; it must be a multiple of 8",
        ),
        (
            lambda q, k, v: (q, k, torch.nn.functional.pad(v, (1, 7))[..., 1:65]),
            "v's address is not a multiple of 16 bytes",
        ),
        (lambda q, k, v: (q, k, torch.cat((v, v), 3)), "head_dim 64 with head_dim_v 128 is not taken"),
    ],
)
def test_strides_and_dims_that_are_not_taken(change, text):
    with pytest.raises(UnsupportedError, match=text):
        flashmask_attention(*change(*tensors()))


def test_gradients_change_nothing_about_the_forward():
    inputs = [x.requires_grad_() for x in tensors()]
    out, lse = flashmask_attention(*inputs, causal=True, return_softmax_lse=True)
    with torch.no_grad():
        want = flashmask_attention(*inputs, causal=True, return_softmax_lse=True)
    assert out.requires_grad and lse.requires_grad and torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_a_gradient_elsewhere_is_named():
    """By the operator; autograd itself lets none through."""
    q, k, v = tensors()
    out, lse = flashmask_attention(q, k, v, return_softmax_lse=True)
    for name, dout, dlse in (("dout", out.cpu(), None), ("dlse", out, lse.cpu())):
        with pytest.raises(ValueError, match=f"{name} is on cpu and query on {DEVICE}"):
            torch.ops.flashmask.backward(
                dout, dlse, q, k, v, out, lse, None, None, None, None, False, None, -1, -1, False, "auto"
            )


@pytest.mark.parametrize("with_plan", [False, True])
def test_a_mask_changed_in_place_is_noticed(with_plan):
    inputs, bounds = tensors(), bounds_of()
    mask = Mask(S, S, bounds=bounds, causal=True)
    if with_plan:
        flashmask_attention(*inputs, mask)
    bounds.zero_()
    if with_plan:
        with pytest.raises(RuntimeError, match="changed in place after its plan was made"):
            flashmask_attention(*inputs, mask)
    else:
        assert (flashmask_attention(*inputs, mask) == 0).all()


# --- Masks on the device ------------------------------------------------------------------------------


def same(on_device, on_host):
    """The same mask, bit for bit, on the device."""
    assert (on_device.seqlen_q, on_device.seqlen_k, on_device.causal, on_device.window, on_device.q_offset) == (
        on_host.seqlen_q,
        on_host.seqlen_k,
        on_host.causal,
        on_host.window,
        on_host.q_offset,
    )
    for name in ("bounds", "block_mask"):
        a, b = getattr(on_device, name), getattr(on_host, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.device == DEVICE and a.dtype == b.dtype and torch.equal(a.cpu(), b)


def values_for(name, seed):
    """Contents that the builder takes."""
    return torch.randint(0, 4, (9,), generator=torch.Generator().manual_seed(seed)) + (name == "qk_sparse")


@pytest.mark.parametrize("name", TRACED)
def test_builders_of_tensors(name):
    for seed in range(5):
        values = values_for(name, seed)
        same(TRACED[name](values.to(DEVICE)), TRACED[name](values))


@pytest.mark.parametrize("name", TRACED)
def test_builders_wait_for_nothing(name):
    values = values_for(name, 0).to(DEVICE)
    TRACED[name](values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        TRACED[name](values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", LISTS)
def test_builders_of_lists(name):
    same(LISTS[name](DEVICE), LISTS[name]("cpu"))


@pytest.mark.parametrize("build", [masks.causal_document, masks.document, masks.causal_blockwise])
def test_builders_of_long_documents(build):
    lengths = torch.randint(0, 300, (3, 40))
    ids = torch.repeat_interleave(torch.arange(40), lengths[0])
    seqlen = 40 * 300
    same(build(seqlens=lengths.to(DEVICE), seqlen=seqlen), build(seqlens=lengths, seqlen=seqlen))
    same(build(doc_ids=ids.to(DEVICE)), build(doc_ids=ids))


@pytest.mark.parametrize("seed", range(20))
def test_other_forms_of_a_mask(seed):
    host = draw_mask(random.Random(seed), longest=300)
    mask = host.to(DEVICE)
    assert torch.equal(mask.to_dense().cpu(), host.to_dense()) and mask.stats() == host.stats()
    if host.seqlen_q and host.seqlen_k:
        assert mask.plot().replace(str(mask.device), str(host.device)) == host.plot()
        ours, theirs = mask.to_block_mask(), host.to_block_mask()
        assert torch.equal(ours.to_dense().cpu(), theirs.to_dense()) and torch.equal(
            ours.full_kv_num_blocks.cpu(), theirs.full_kv_num_blocks
        )
    if host.block_mask is None:
        assert startend(mask) == startend(host)


def startend(mask):
    """to_startend as numbers, or the message of the error."""
    try:
        bounds, causal = mask.to_startend()
        return bounds.tolist(), causal
    except UnrepresentableMaskError as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_from_dense(family):
    visible = FAMILIES[family]().to_dense()
    same(masks.from_dense(visible.to(DEVICE)), masks.from_dense(visible))


def test_from_dense_that_does_not_fit():
    visible = torch.ones(40, 40, dtype=torch.bool, device=DEVICE)
    visible[[3, 6, 9], 17] = False
    with pytest.raises(UnrepresentableMaskError, match="column 17"):
        masks.from_dense(visible)


def test_moves():
    mask = masks.causal_document(seqlens=[3, 4])
    there = mask.cuda()
    same(there, mask)
    assert there.to(DEVICE) is there and there.to("cuda") is there
    assert there.plan() is there.plan("cuda") is there.plan(DEVICE) and there.plan().device == DEVICE
    same(flashmask.masks.causal_document(seqlens=[3, 4], device="cuda"), mask)
    assert repr(there).splitlines()[0] == repr(mask).splitlines()[0].replace("cpu", str(DEVICE))


@pytest.mark.parametrize("loader", [False, True])
def test_moves_from_pinned_memory_wait_for_nothing(loader):
    mask = masks.causal_document(seqlens=[3, 4])
    pinned = (
        next(iter(torch.utils.data.DataLoader([mask], batch_size=None, collate_fn=lambda x: x, pin_memory=True)))
        if loader
        else mask.pin_memory()
    )
    assert pinned.bounds.is_pinned() and torch.equal(pinned.bounds, mask.bounds)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = pinned.to(DEVICE, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same(there, mask)
