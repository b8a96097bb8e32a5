# SPDX-License-Identifier: Apache-2.0
"""Positions of rows and keys, through every frontend of the package, against a dense float64 attention."""

import dense_reference
import flashmask
import pytest
import torch
from dense_reference import assert_close
from devices import DEVICE, ON_CUDA, tolerance_of
from flashmask import Mask, flashmask_attention, masks
from flashmask import explain as explain_call
from flashmask.torch import ops

ROWS, KEYS, HEADS = 150, 170, 4
DTYPES = [torch.bfloat16, torch.float16] if ON_CUDA else [torch.float32, torch.bfloat16]


def tensors(dtype=DTYPES[0], batch=2):
    shapes = ((batch, ROWS, HEADS, 16), (batch, KEYS, 2, 16), (batch, KEYS, 2, 8))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).to(DEVICE) for shape in shapes]


def positions(batch, seqlen, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 150, (batch, seqlen), dtype=torch.int32, generator=generator).to(DEVICE)


def visible(q_pos, k_pos, causal=False, window=(-1, -1)):
    """The rule, once more: bool [batch, 1, rows, keys]."""
    distance = k_pos.long()[:, None, None, :] - q_pos.long()[:, None, :, None]
    seen = (distance <= 0) | (not causal)
    seen &= (distance >= -window[0]) | (window[0] == -1)
    return seen & ((distance <= window[1]) | (window[1] == -1))


BANDS = [{"causal": True}, {"window_size": (30, 5)}, {"causal": True, "window_size": (9, -1)}]


def results(function, leaves, dout, dlse):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out, lse = function(*leaves)
    return (out, lse, *torch.autograd.grad(dense_reference.loss_of(out, lse, dout, dlse), leaves))


def dense(q, k, v, seen):
    out, lse = dense_reference.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), seen.repeat_interleave(HEADS // seen.shape[1], 1)
    )
    return out.transpose(1, 2), lse


def compare(call, seen, leaves):
    q, _, v = leaves
    dout = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64, device=DEVICE)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64, device=DEVICE)
    got = results(call, leaves, dout, dlse)
    want = results(lambda *x: dense(*x, seen), [x.double() for x in leaves], dout, dlse)
    for name, x, y in zip(dense_reference.NAMES, got, want):
        assert_close(x, y, name, tolerance_of(name, q.dtype))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", [(1, 1), (2, 2), (1, 2)])
def test_against_a_dense_attention(band, dtype, batches):
    q_pos, k_pos = positions(batches[0], ROWS), positions(batches[1], KEYS, 1)
    seen = visible(q_pos, k_pos, band.get("causal", False), band.get("window_size", (-1, -1)))
    call = lambda *x: flashmask_attention(*x, **band, q_pos=q_pos, k_pos=k_pos, return_softmax_lse=True)  # noqa: E731
    compare(call, seen, tensors(dtype))
    mask = Mask(ROWS, KEYS, causal=band.get("causal", False), window=band.get("window_size"), q_pos=q_pos, k_pos=k_pos)
    assert torch.equal(mask.to_dense(), seen) and mask.batch == max(batches) and mask.heads == 1
    compare(lambda *x: ops.attention(*x, mask), seen, tensors(dtype))


def test_intervals_and_blocks_go_on_counting_rows_and_keys():
    q_pos, k_pos = positions(1, ROWS), positions(1, KEYS, 1)
    bounds = torch.randint(0, ROWS, (2, 2, KEYS, 1), dtype=torch.int32, device=DEVICE)
    keep = torch.tensor([[[[1, 0], [1, 1]]]], dtype=torch.bool, device=DEVICE)
    given = {"startend_row_indices": bounds, "causal": True, "block_mask": keep, "q_pos": q_pos, "k_pos": k_pos}
    row, key = torch.arange(ROWS, device=DEVICE), torch.arange(KEYS, device=DEVICE)
    seen = visible(q_pos, k_pos, causal=True) & (row[:, None] < bounds[..., 0][:, :, None, :])
    seen = seen & keep[:, :, row[:, None] // 128, key // 128]
    compare(lambda *x: flashmask_attention(*x, **given, return_softmax_lse=True), seen, tensors())
    assert torch.equal(Mask(ROWS, KEYS, bounds=bounds, **{k: given[k] for k in list(given)[1:]}).to_dense(), seen)


@pytest.mark.skipif(ON_CUDA, reason="float64 is the reference backend's")
def test_gradcheck():
    q, k, v = (x[:, :9].requires_grad_() for x in tensors(torch.float64, 1))
    q_pos, k_pos = positions(1, 9), positions(1, 9, 1)
    call = lambda *x: flashmask_attention(*x, causal=True, q_pos=q_pos, k_pos=k_pos, backend="reference")  # noqa: E731
    torch.autograd.gradcheck(call, (q, k, v))


def test_opcheck():
    q, k, v = (x.requires_grad_() for x in tensors())
    given = {"q_pos": positions(2, ROWS), "k_pos": positions(1, KEYS)}
    plan = torch.ops.flashmask.plan
    torch.library.opcheck(plan.default, (None, None, ROWS, KEYS, True, None, 3, -1, DEVICE), given)
    made = plan(None, None, ROWS, KEYS, True, None, 3, -1, DEVICE, **given)
    band = (None, True, None, 3, -1, True, "auto")
    torch.library.opcheck(torch.ops.flashmask.forward.default, (q, k, v, None, None, made, *band), given)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    q_pos, k_pos = positions(2, ROWS), positions(2, KEYS)

    def call(*x):
        return flashmask_attention(*x, q_pos=q_pos, k_pos=k_pos, window_size=(20, 0), return_softmax_lse=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    compare(compiled, visible(q_pos, k_pos, window=(20, 0)), tensors())


@pytest.mark.parametrize("mask", [lambda: positions(2, 5), lambda: positions(1, 5)])
def test_vmap(mask):
    q_pos, k_pos = mask(), mask()
    q, k, v = (torch.randn(3, 2, 5, 2, 8, device=DEVICE, dtype=DTYPES[0]) for _ in range(3))
    call = lambda *x: flashmask_attention(*x, causal=True, q_pos=q_pos, k_pos=k_pos)  # noqa: E731
    got = torch.vmap(call)(q, k, v)
    for n in range(3):
        assert torch.equal(got[n], call(q[n], k[n], v[n]))


def test_explain_names_them():
    q, k, v = tensors()
    given = {"q_pos": positions(1, ROWS), "k_pos": positions(1, KEYS)}
    text = explain_call(q, k, v, causal=True, **given)
    assert "positions" in text and "q_pos [1, 150] and k_pos [1, 170]" in text and "row 0" not in text
    assert "positions" not in explain_call(q, k, v, causal=True)


def test_masks_that_are_moved_and_replaced():
    q_pos, k_pos = positions(1, ROWS), positions(1, KEYS)
    mask = Mask(ROWS, KEYS, causal=True, q_pos=q_pos.t().contiguous().t(), k_pos=k_pos)
    assert mask.q_pos.is_contiguous() and mask.to("meta").k_pos.device.type == "meta"
    assert mask.replace(q_pos=None, k_pos=None).q_pos is None
    with pytest.raises(ValueError, match="q_pos"):
        flashmask_attention(*tensors(), mask, q_pos=q_pos, k_pos=k_pos)
    with pytest.raises(ValueError, match="batch"):
        flashmask_attention(*tensors(), causal=True, q_pos=positions(3, ROWS), k_pos=k_pos)


# --- Windows of trees ---------------------------------------------------------------------------------

PARENTS, LENGTHS = [-1, 0, 0, 2, -1], [40, 30, 20, 40, 20]


def path_of(node):
    """Tokens on the way from a root to the end of a node."""
    first = [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]
    tokens = []
    while node != -1:
        tokens = [*range(first[node], first[node] + LENGTHS[node]), *tokens]
        node = PARENTS[node]
    return torch.tensor(tokens)


@pytest.mark.parametrize("window", [1, 7, 50, 10**6])
def test_paths_of_a_tree_see_what_they_see_alone(window):
    mask = masks.prefix_tree(PARENTS, LENGTHS, window=window, device=DEVICE)
    q, k, v = (x[:, :ROWS] for x in tensors())
    out = flashmask_attention(q, k, v, mask)
    for leaf in (1, 3, 4):
        path = path_of(leaf).to(DEVICE)
        alone = flashmask_attention(q[:, path], k[:, path], v[:, path], causal=True, window_size=(window - 1, 0))
        assert_close(out[:, path], alone, "out", tolerance_of("out", DTYPES[0]))
        assert torch.equal(mask.q_pos[0, path].cpu(), torch.arange(len(path), dtype=torch.int32))


def test_a_windowed_tree_in_every_form():
    tree = masks.prefix_tree(PARENTS, LENGTHS, window=7)
    first = [sum(LENGTHS[:n]) for n in range(5)]
    same = masks.prefix_tree_from_intervals(first, [130, 70, 130, 130, 150], window=7)
    for mask in (
        same,
        masks.prefix_tree(torch.tensor([PARENTS] * 2), torch.tensor([LENGTHS] * 2), window=7, seqlen=150),
    ):
        assert torch.equal(mask.to_dense()[:1], tree.to_dense()) and mask.k_pos.shape == (mask.batch, 150)
    assert masks.prefix_tree(PARENTS, LENGTHS).q_pos is None
    compiled = torch.compile(lambda x: masks.prefix_tree(x, window=3).q_pos, fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor([-1, 0, 0, 2])).tolist() == [[0, 1, 1, 2]]
    made = masks.prefix_tree(torch.empty(9, dtype=torch.int64, device="meta"), window=3)
    assert made.q_pos.shape == (1, 9) and made.q_pos.device.type == "meta"


@pytest.mark.parametrize("window, error", [(0, ValueError), (-2, ValueError), (1.5, TypeError)])
def test_windows_that_are_none(window, error):
    with pytest.raises(error, match="window is"):
        masks.prefix_tree(PARENTS, LENGTHS, window=window)


def test_a_windowed_tree_has_one_head():
    with pytest.raises(ValueError, match="window is 3 and the tree has 2 heads"):
        masks.prefix_tree(torch.tensor([[[-1, 0], [-1, -1]]]), window=3)
    assert isinstance(flashmask.masks.prefix_tree([-1], window=3), Mask)
