# SPDX-License-Identifier: Apache-2.0
"""Checks that need CUDA tensors: the work on the device, and refusals.

Needs FLASHMASK_TEST_DEVICE=cuda. Streams, graphs and several devices: test_cuda_streams.py; masks there:
test_cuda_masks.py.
"""

import threading
import time

import pytest
import torch
from cuda_checks import (
    BACKWARD,
    FAST_BACKWARD,
    FORWARD,
    GROUPED_BACKWARD,
    GROUPED_FAST_BACKWARD,
    PLAN,
    WITHOUT_SUMS,
    assert_runs,
    bounds_of,
    profiled,
    runs_hopper_kernels,
    tensors,
)
from devices import DEVICE, cuda_only
from flashmask import UnsupportedError, flashmask_attention, masks
from flashmask.torch import ops
from flashmask.torch.mask import Mask
from test_attention import S

pytestmark = cuda_only

# --- What runs on the device --------------------------------------------------------------------------


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


def with_graph(inputs, mask, layout="bshd", deterministic=True):
    """(leaves, out, lse) of a call whose gradients can be asked for."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = flashmask_attention(*leaves, mask, layout=layout, return_softmax_lse=True, deterministic=deterministic)
    return leaves, *results


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("use_lse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_is_three_kernels_or_four_and_one_more_if_deterministic(layout, use_lse, deterministic):
    """Nothing is copied or filled, and the plan is the forward's."""
    inputs, name = LAYOUTS[layout]()
    leaves, out, lse = with_graph(inputs, Mask(S, S, bounds=bounds_of(), causal=True), name, deterministic)
    outputs = (out, lse) if use_lse else (out,)
    gradients = [torch.randn_like(x) for x in outputs]
    assert_runs(
        lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True),
        (BACKWARD if deterministic else FAST_BACKWARD) + ["_reduce_dkv"] * (inputs[0].shape != inputs[1].shape),
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
    """On Hopper, where such a tile gives dq itself, unless deterministic; the other kernels always add to sums."""
    leaves, out, _ = with_graph(tensors(seqlen_k=128), Mask(S, 128, causal=True), deterministic=False)
    dout = torch.randn_like(out)
    expected = WITHOUT_SUMS if runs_hopper_kernels() else GROUPED_FAST_BACKWARD
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
    assert len(device) == 6 and all(word in name for word, name in zip(GROUPED_BACKWARD, device[1:])), device


def test_many_items_are_counted_down_from_a_fill():
    """On Hopper; the other kernels have a CTA for each item, and no counter."""
    inputs = tensors(batch=8, seqlen_q=1024, seqlen_k=1024)
    mask = Mask(1024, 1024, bounds=bounds_of(1024), causal=True)
    mask.plan()
    expected = ["Memset", *FORWARD] if runs_hopper_kernels() else FORWARD
    assert_runs(lambda: flashmask_attention(*inputs, mask), expected)


def test_a_plan_is_four_kernels():
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

    def allocated():
        time.sleep(0.1)  # autograd's thread lets go of the last node after the call has returned
        return torch.cuda.memory_allocated(DEVICE)

    before = None
    for _ in range(20):
        out = flashmask_attention(*inputs, bounds, causal=True)
        if requires_grad:
            torch.autograd.grad(out.sum(), inputs)
        del out
        before = allocated() if before is None else before
    assert allocated() == before


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
        masks.causal(1 << 26).plan(DEVICE)
    assert flashmask_attention(*tensors(), causal=True).isfinite().all()


def test_few_ctas_give_the_same_bits():
    leaves, results = [x.requires_grad_() for x in tensors()], []
    for max_ctas in (0, 1, 5):
        out = flashmask_attention(*leaves, causal=True, deterministic=True, max_ctas=max_ctas)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


# --- What the kernels do not take ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, text",
    [
        (
            lambda q, k, v: (q, torch.nn.functional.pad(k, (0, 4))[..., :64], v),
            "k has stride 68 in dimension 2; it must be a multiple of 8",
        ),
        (
            lambda q, k, v: (q, k, torch.nn.functional.pad(v, (1, 7))[..., 1:65]),
            "v's address is not a multiple of 16 bytes",
        ),
        (lambda q, k, v: (q, k, v[..., :36].contiguous()), "head_dim 64 with head_dim_v 36 is not taken"),
    ],
)
def test_strides_and_dims_that_are_not_taken(change, text):
    with pytest.raises(UnsupportedError, match=text):
        flashmask_attention(*change(*tensors()))


def test_an_expanded_query():
    """TMA takes none; the other kernels read it as it lies, with the bits of a contiguous one."""
    q, k, v = tensors()
    expanded = q[:1].expand(q.shape)

    def results(query):
        leaves = [x.detach().requires_grad_() for x in (query, k, v)]
        out, lse = flashmask_attention(*leaves, causal=True, deterministic=True, return_softmax_lse=True)
        return out, lse, *torch.autograd.grad(out.square().sum(), leaves)

    if runs_hopper_kernels():
        with pytest.raises(UnsupportedError, match=r"q is expanded \(stride 0\) in dimension 0; make it contiguous"):
            results(expanded)
        return
    assert all(torch.equal(a, b) for a, b in zip(results(expanded), results(expanded.contiguous())))


def test_a_call_is_the_first_of_a_thread():
    """A new thread has no CUDA context until the first call that makes one, which may be this."""
    q, k, v = tensors()
    want, got = flashmask_attention(q, k, v, causal=True), []
    torch.empty_like(want), torch.empty_like(want)  # torch's allocator has the memory, and asks CUDA for none
    thread = threading.Thread(target=lambda: got.append(flashmask_attention(q, k, v, causal=True)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], want)


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
