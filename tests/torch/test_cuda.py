# SPDX-License-Identifier: Apache-2.0
"""What only CUDA tensors can show: what runs on the device, streams, graphs, several devices, masks on the device, the backward that is not there.

Needs FLASHMASK_TEST_DEVICE=cuda.
"""

import random

import pytest
import torch
from devices import DEVICE, cuda_only
from test_attention import FAMILIES, S, tensors
from test_mask import draw_mask
from test_masks import LISTS, TRACED
from torch.autograd import DeviceType

import flashmask
from flashmask import UnrepresentableMaskError, UnsupportedError, flashmask_attention, masks, ops
from flashmask.mask import Mask

pytestmark = cuda_only
FORWARD = ["forward"]
PLAN = ["classify", "transpose", "rank"]


# --- What runs on the device --------------------------------------------------------------------------


def profiled(call):
    """(kernels, copies and fills in their order, names of what the host asked of CUDA's runtime) of one call."""
    for _ in range(2):  # the first profile of a process may miss events
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    device = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return device, [event.name for event in events if event.device_type == DeviceType.CPU and event.name.startswith("cu")]


def assert_runs(call, expected):
    """On the device exactly these, a word of each name; no copy anywhere, and the host waits for nothing."""
    device, host = profiled(call)
    assert len(device) == len(expected) and all(word in name for word, name in zip(expected, device)), (expected, device)
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


def test_calls_leave_no_memory_behind():
    inputs, bounds = tensors(), bounds_of()
    before = None
    for _ in range(20):
        flashmask_attention(*inputs, bounds, causal=True, return_softmax_lse=True)
        before = torch.cuda.memory_allocated(DEVICE) if before is None else before
    assert torch.cuda.memory_allocated(DEVICE) == before


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


def test_two_streams_at_once():
    """Calls of two streams share nothing, neither workspace nor outputs."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    problems = [(tensors(batch=4, seqlen_q=1024, seqlen_k=1024), Mask(1024, 1024, bounds=bounds_of(1024), causal=True)) for _ in streams]
    want = [flashmask_attention(*inputs, mask) for inputs, mask in problems]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(10):
        for stream, (inputs, mask), outs in zip(streams, problems, results):
            with torch.cuda.stream(stream):
                outs.append(flashmask_attention(*inputs, mask))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for outs, expected in zip(results, want) for out in outs)


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
    graph, (out, lse) = captured(lambda: flashmask_attention(*inputs, mask if as_mask else bounds, return_softmax_lse=True, **arguments))
    for _ in range(3):
        for x in inputs:
            x.normal_()
        bounds.copy_(bounds_of())
        graph.replay()
        want, want_lse = flashmask_attention(*inputs, bounds, causal=True, return_softmax_lse=True)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_a_graph_with_a_plan_from_outside():
    """Through the operator; then the graph is the one kernel, and the mask has to stay as it is."""
    inputs = tensors()
    mask = Mask(S, S, bounds=bounds_of(), causal=True)
    bounds, block_mask, *band = ops.mask_arguments(mask)
    plan = mask.plan()
    graph, (out, _) = captured(lambda: torch.ops.flashmask.forward(*inputs, bounds, block_mask, plan, None, *band, False, "auto"))
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
    with pytest.raises(ValueError, match=f"the mask is on cpu and its plan was asked for on {DEVICE}; move the mask first"):
        flashmask_attention(q, k, v, bounds_of().cpu(), causal=True)


# --- What the kernels do not take ---------------------------------------------------------------------


@pytest.mark.parametrize("change, text", [
    (lambda q, k, v: (q[:1].expand(2, -1, -1, -1), k, v), r"q is expanded \(stride 0\) in dimension 0; make it contiguous"),
    (lambda q, k, v: (q, torch.nn.functional.pad(k, (0, 4))[..., :64], v), "k has stride 68 in dimension 2; it must be a multiple of 8"),
    (lambda q, k, v: (q, k, torch.nn.functional.pad(v, (1, 7))[..., 1:65]), "v's address is not a multiple of 16 bytes"),
    (lambda q, k, v: (q, k, torch.cat((v, v), 3)), "head_dim 64 with head_dim_v 128 is not taken"),
])
def test_strides_and_dims_that_are_not_taken(change, text):
    with pytest.raises(UnsupportedError, match=text):
        flashmask_attention(*change(*tensors()))


def test_the_forward_runs_where_gradients_are_wanted_and_the_backward_says_that_there_is_none():
    inputs = [x.requires_grad_() for x in tensors()]
    out, lse = flashmask_attention(*inputs, causal=True, return_softmax_lse=True)
    with torch.no_grad():
        want = flashmask_attention(*inputs, causal=True, return_softmax_lse=True)
    assert out.requires_grad and lse.requires_grad and torch.equal(out, want[0]) and torch.equal(lse, want[1])
    for result in (out, lse):
        with pytest.raises(UnsupportedError, match="backward is not available on CUDA yet; run it on the CPU"):
            result.float().sum().backward(retain_graph=True)
    assert all(x.grad is None for x in inputs)


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
        on_host.seqlen_q, on_host.seqlen_k, on_host.causal, on_host.window, on_host.q_offset)
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
    same(build(seqlens=lengths.to(DEVICE), seqlen=7000), build(seqlens=lengths, seqlen=7000))
    same(build(doc_ids=ids.to(DEVICE)), build(doc_ids=ids))


@pytest.mark.parametrize("seed", range(20))
def test_other_forms_of_a_mask(seed):
    host = draw_mask(random.Random(seed), longest=300)
    mask = host.to(DEVICE)
    assert torch.equal(mask.to_dense().cpu(), host.to_dense()) and mask.stats() == host.stats()
    if host.seqlen_q and host.seqlen_k:
        assert mask.plot().replace(str(mask.device), str(host.device)) == host.plot()
        ours, theirs = mask.to_block_mask(), host.to_block_mask()
        assert torch.equal(ours.to_dense().cpu(), theirs.to_dense()) and torch.equal(ours.full_kv_num_blocks.cpu(), theirs.full_kv_num_blocks)
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
