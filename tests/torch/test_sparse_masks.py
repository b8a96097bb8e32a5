# SPDX-License-Identifier: Apache-2.0
"""Builders of masks of any number of intervals per column, against predicates of single elements."""

import dense_reference
import pytest
import torch
from builder_checks import check, check_cpp
from devices import DEVICE, DTYPE, tolerance_of
from flashmask import flashmask_attention, masks
from flashmask.torch import ops


def nearest(place, length, kernel, dilation):
    """The `kernel` places of a line nearest to `place`, of its remainder by `dilation`; of two the one before it."""
    return sorted(range(place % dilation, length, dilation), key=lambda at: abs(at - place))[:kernel]


@pytest.mark.parametrize(
    "height, width, kernel_height, kernel_width, dilation",
    [(5, 6, 3, 3, 1), (4, 5, 2, 4, 1), (6, 7, 2, 3, 2), (3, 4, 3, 4, 1), (1, 9, 1, 3, 1), (9, 1, 4, 1, 1)],
)
def test_neighborhood_2d(height, width, kernel_height, kernel_width, dilation):
    mask = masks.neighborhood_2d(height, width, kernel_height, kernel_width, dilation)
    assert (mask.column_ptr is None) == (1 in (height, width) or (kernel_height, kernel_width) == (height, width))
    check(
        mask,
        height * width,
        height * width,
        lambda i, j: (
            j // width in nearest(i // width, height, kernel_height, dilation)
            and j % width in nearest(i % width, width, kernel_width, dilation)
        ),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window, dilation", [(1, 1), (3, 1), (3, 2), (2, 5), (-1, 3), (2, 100)])
def test_dilated(window, dilation, causal):
    mask = masks.dilated(23, window, dilation, causal)
    assert (mask.column_ptr is None) == (dilation == 1 or dilation > 23)

    def rule(i, j):
        return (
            abs(i - j) % dilation == 0 and (window == -1 or abs(i - j) < window * dilation) and (j <= i or not causal)
        )

    check(mask, 23, 23, rule)


@pytest.mark.parametrize("seqlen, block, first, window, count", [(96, 4, 1, 1, 3), (50, 7, 0, 0, 2), (20, 3, 2, 9, 1)])
def test_bigbird(seqlen, block, first, window, count):
    mask = masks.bigbird(seqlen, block, first, window, count, seed=3)
    seen = mask.to_dense()[0, 0, ::block, ::block]  # of blocks
    row, key = torch.arange(len(seen))[:, None], torch.arange(len(seen))
    always = (row < first) | (key < first) | ((row - key).abs() <= window)
    assert bool(seen[always].all())
    assert torch.equal((seen & ~always).sum(1), (~always).sum(1).clamp(max=count))
    check(mask, seqlen, seqlen, lambda i, j: seen[i // block, j // block])
    assert torch.equal(mask.to_dense(), masks.bigbird(seqlen, block, first, window, count, 3).to_dense())


def test_bigbird_as_in_cpp():
    mask = masks.bigbird(96, 4, 1, 1, 3, seed=5)
    check_cpp(mask, "bigbird", 96, block=4, global_blocks=1, window=1, random_blocks=3, seed=5)


MASKS = {
    "bigbird": lambda: masks.bigbird(150, 10, 1, 1, 2),
    "dilated": lambda: masks.dilated(130, 5, 7),
    "neighborhood_2d": lambda: masks.neighborhood_2d(12, 15, 5, 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_the_dense_mask(name):
    mask = MASKS[name]().to(DEVICE)
    assert mask.column_ptr is not None
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, mask.seqlen_q, 16)
    leaves = [torch.randn(shape, generator=generator).to(DEVICE, DTYPE).requires_grad_() for _ in range(3)]
    dout = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    def results(attend):
        out, lse = attend(*leaves)
        return (out, lse, *torch.autograd.grad(dense_reference.loss_of(out, lse, dout, lse.detach() * 0), leaves))

    def own(*tensors):
        out, lse = ops.attention(*(x.transpose(1, 2) for x in tensors), mask)
        return out.transpose(1, 2), lse

    want = results(lambda *x: dense_reference.attention(*x, mask.to_dense()))
    for name, x, y in zip(dense_reference.NAMES, results(own), want):
        dense_reference.assert_close(x, y, name, tolerance_of(name, DTYPE))


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_another_device_are_built_on_the_host(name):
    with torch.device("meta"):
        assert MASKS[name]().column_ptr.is_meta


def test_compiled_code_breaks_off_to_build_one():
    q = torch.randn(1, 60, 2, 16).to(DEVICE, DTYPE)
    call = lambda x: flashmask_attention(x, x, x, masks.dilated(60, 3, 7, device=DEVICE))  # noqa: E731
    assert torch.equal(torch.compile(call, backend="eager")(q), call(q))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_build_lists"):
        torch.compile(call, backend="eager", fullgraph=True)(q)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: masks.neighborhood_2d(3, 4, 4, 1), "kernel_height is 4 and dilation 1; .* fit in height, 3"),
        (lambda: masks.neighborhood_2d(3, 4, 0, 1), "kernel_height is 0; it must be at least 1"),
        (lambda: masks.bigbird(9, 0, 1, 1, 1), "block is 0; it must be at least 1"),
        (lambda: masks.bigbird(9, 2, 1, -1, 1), "window is -1; it must be at least 0"),
        (lambda: masks.dilated(9, 0, 1), "window is 0; it must be at least 1, or -1"),
        (lambda: masks.dilated(9, 1, -3), "dilation is -3; it must be at least 1"),
        (lambda: masks.neighborhood_2d(3, -4, 1, 1), "width is -4"),
    ],
)
def test_wrong_arguments_are_named(build, words):
    with pytest.raises(ValueError, match=words):
        build()
