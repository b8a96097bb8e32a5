# SPDX-License-Identifier: Apache-2.0
"""Masks of more than two hidden intervals per column: against their dense matrices, in every form and in attention.

Each test has its matrix from a rule of its own.
"""

import pickle

import dense_reference
import flashmask
import pytest
import torch
from dense_reference import assert_close
from devices import DEVICE, DTYPE, ON_CUDA, cuda_only, tolerance_of
from flashmask import Mask, UnsupportedError, flashmask_attention, masks
from flashmask.inference import SequenceMask
from flashmask.torch import operators, ops

ROWS, KEYS, HEADS = 200, 264, 4
DTYPES = [torch.bfloat16, torch.float16] if ON_CUDA else [torch.float32, torch.bfloat16]


def indices(rows, keys):
    return torch.arange(rows)[:, None], torch.arange(keys)[None, :]


def random_exclusions(rows, keys, seed=0):
    """Causal documents without 5 % of their elements."""
    row, key = indices(rows, keys)
    generator = torch.Generator().manual_seed(seed)
    document = torch.randint(0, 40, (max(rows, keys),), generator=generator).eq(0).cumsum(0)
    same = document[:rows, None] == document[None, :keys]
    return same & (key <= row) & (torch.rand(rows, keys, generator=generator) > 0.05)


def neighbourhoods(rows, keys, width=20, reach=3):
    """Pixels near a pixel, of an image of `width` columns, row by row."""
    row, key = indices(rows, keys)
    near = (row // width - key // width).abs() <= reach
    return near & ((row % width - key % width).abs() <= reach)


def dilated(rows, keys, reach=40, step=3):
    row, key = indices(rows, keys)
    return ((row - key).abs() <= reach) & ((row - key) % step == 0)


def bigbird(rows, keys, block=16):
    """A window, some rows and keys for all, and random blocks."""
    row, key = indices(rows, keys)
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(-(-rows // block), -(-keys // block), generator=generator) < 0.15
    seen = ((row - key).abs() <= 24) | (key < 8) | (row < 8)
    return seen | chosen[row // block, key // block]


def wholly_random(rows, keys):
    return torch.rand(rows, keys, generator=torch.Generator().manual_seed(4)) > 0.4


POSITIONS = {"q_pos": ROWS, "k_pos": KEYS}
RULES = [random_exclusions, neighbourhoods, dilated, bigbird, wholly_random]


def tensors(dtype=DTYPE, batch=2, rows=ROWS, keys=KEYS, dims=(16, 8)):
    generator = torch.Generator().manual_seed(5)
    shapes = ((batch, rows, HEADS, dims[0]), (batch, keys, 2, dims[0]), (batch, keys, 2, dims[1]))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE, dtype) for shape in shapes]


def results(function, leaves, dout, dlse):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out, lse = function(*leaves)
    return (out, lse, *torch.autograd.grad(dense_reference.loss_of(out, lse, dout, dlse), leaves))


def compare(call, seen, leaves, **features):
    """`seen` broadcasts to [batch, heads, rows, keys]; features: as dense_reference.attention takes them."""
    q, _, v = leaves
    dout = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64).to(DEVICE)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float64).to(DEVICE)
    seen = seen[(None,) * (4 - seen.ndim)].to(DEVICE)

    def dense(*x):
        out, lse = dense_reference.attention(
            *(y.transpose(1, 2) for y in x), seen.repeat_interleave(HEADS // seen.shape[1], 1), **features
        )
        return out.transpose(1, 2), lse

    got = results(call, leaves, dout, dlse)
    want = results(dense, [x.double() for x in leaves], dout, dlse)
    for name, x, y in zip(dense_reference.NAMES, got, want):
        assert_close(x, y, name, tolerance_of(name, q.dtype))
    return got


def lists_of(rule, rows=ROWS, keys=KEYS, device=DEVICE):
    visible = rule(rows, keys)
    mask = masks.from_dense(visible).to(device)
    assert mask.column_ptr is not None, "the rule fits two intervals"
    return mask, visible


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_against_a_dense_attention(rule, dtype):
    mask, visible = lists_of(rule)
    assert torch.equal(mask.to_dense()[0, 0].cpu(), visible)
    compare(lambda *x: flashmask_attention(*x, mask, return_softmax_lse=True), visible, tensors(dtype))


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("rows, keys", [(9, 300), (129, 64), (300, 129), (577, 641)])
def test_odd_lengths_and_head_dims(rows, keys, dims):
    mask, visible = lists_of(wholly_random, rows, keys)
    leaves = tensors(batch=1, rows=rows, keys=keys, dims=dims)
    compare(lambda *x: flashmask_attention(*x, mask, return_softmax_lse=True), visible, leaves)


def test_batch_and_heads(rng):
    """Lists of their own for each of some entries and heads, beside a block mask of others."""
    keep = torch.tensor([[[[1, 1, 0], [0, 1, 1]]], [[[1, 0, 1], [1, 1, 1]]]], dtype=torch.bool)
    row, key = indices(ROWS, KEYS)
    for batch, heads in ((1, 1), (2, 1), (1, 2), (2, HEADS)):
        visible = torch.rand(batch, heads, ROWS, KEYS) > 0.2
        mask = masks.from_dense(visible).to(DEVICE)
        assert mask.shape == visible.shape
        compare(lambda *x: ops.attention(*x, mask), visible, tensors())  # noqa: B023
        blocked = mask.replace(block_mask=keep.to(DEVICE))
        seen = visible & keep[:, :, row // 128, key // 128]
        assert torch.equal(blocked.to_dense().cpu(), seen)
        compare(lambda *x: ops.attention(*x, blocked), seen, tensors())  # noqa: B023


def test_lists_beside_a_band_and_positions():
    """Intervals as a caller writes them: in any order, overlapping, empty, out of range."""
    generator = torch.Generator().manual_seed(6)
    count = torch.randint(0, 9, (1, 2, KEYS), generator=generator)
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), count.flatten().cumsum(0)))
    column_ptr = torch.stack((ends[: KEYS + 1], ends[KEYS:]))[None].int()
    begin = torch.randint(-5, ROWS + 5, (int(ends[-1]),), generator=generator)
    intervals = torch.stack((begin, begin + torch.randint(-2, 30, begin.shape, generator=generator)), 1).int()
    row, key = indices(ROWS, KEYS)
    hidden = torch.zeros(1, 2, ROWS, KEYS, dtype=torch.bool)
    for head in range(2):
        for j in range(KEYS):
            for n in range(int(column_ptr[0, head, j]), int(column_ptr[0, head, j + 1])):
                first, last = intervals[n].tolist()
                hidden[0, head, max(first, 0) : max(last, 0), j] = True
    q_pos = torch.randint(0, 300, (2, ROWS), dtype=torch.int32, generator=generator)
    k_pos = torch.randint(0, 300, (1, KEYS), dtype=torch.int32, generator=generator)
    distance = q_pos[:, None, :, None] - k_pos[:, None, None, :]
    bands = {
        (): torch.ones(ROWS, KEYS, dtype=torch.bool),
        (("causal", True),): key <= row + KEYS - ROWS,
        (("window", (50, 9)), ("q_offset", 7)): (key >= row + 7 - 50) & (key <= row + 7 + 9),
        (("causal", True), ("q_pos", q_pos), ("k_pos", k_pos)): distance >= 0,
        (("window", (90, -1)), ("q_pos", q_pos), ("k_pos", k_pos)): distance <= 90,
    }
    for band, inside in bands.items():
        mask = Mask(ROWS, KEYS, column_ptr=column_ptr, intervals=intervals, **dict(band)).to(DEVICE)
        seen = inside & ~hidden
        assert torch.equal(mask.to_dense().cpu(), seen)
        assert mask.stats().visible == int(seen.sum())
        compare(lambda *x: ops.attention(*x, mask), seen, tensors())  # noqa: B023


FEATURES = {
    "sink": {"sink": torch.linspace(-1, 2, HEADS)},
    "softcap": {"softcap": 3.0},
    "ALiBi": {"alibi_slopes": torch.linspace(0.1, 0.5, HEADS)},
    "dropout": {"dropout": 0.3, "dropout_state": torch.tensor([5, -6])},
    "all": {
        "softcap": 20.0,
        "sink": torch.linspace(-1, 2, HEADS),
        "alibi_slopes": torch.linspace(0.1, 0.5, HEADS),
        "dropout": 0.1,
        "dropout_state": torch.tensor([2**62, 3]),
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature):
    mask, visible = lists_of(wholly_random)
    given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in FEATURES[feature].items()}
    wanted = {name: x for name, x in given.items() if not name.startswith("dropout")}
    if p := given.get("dropout"):
        kept = flashmask.dropout_mask(given["dropout_state"], p, 2, HEADS, ROWS, KEYS)
        wanted["weights"] = kept * (65536 / (65536 - round(p * 65536)))
    compare(lambda *x: ops.attention(*x, mask, **given), visible, tensors(), **wanted)


def test_deterministic_gradients_have_the_same_bits():
    mask, visible = lists_of(random_exclusions)
    call = lambda *x: ops.attention(*x, mask, deterministic=True)  # noqa: E731
    torch.manual_seed(0)
    first = compare(call, visible, tensors())
    torch.manual_seed(0)
    for x, y in zip(first, compare(call, visible, tensors())):
        assert torch.equal(x, y)


def test_partial_results():
    mask, visible = lists_of(neighbourhoods)
    got = compare(lambda *x: ops.attention(*x, mask, partial_out=True), visible, tensors())
    assert got[0].dtype == torch.float32


def test_positions_beside_features():
    mask, visible = lists_of(wholly_random)
    generator = torch.Generator().manual_seed(7)
    pos = {name: torch.randint(0, 300, (1, n), dtype=torch.int32, generator=generator) for name, n in POSITIONS.items()}
    seen = visible & (pos["k_pos"][0] <= pos["q_pos"][0, :, None])
    mask = mask.cpu().replace(causal=True, window=None, q_offset=None, **pos).to(DEVICE)
    sink = torch.linspace(-1, 2, HEADS).to(DEVICE)
    compare(lambda *x: ops.attention(*x, mask, sink=sink), seen, tensors(), sink=sink)


@cuda_only
def test_a_plan_has_a_tile_for_each_partial_granule():
    mask, visible = lists_of(random_exclusions, 700, 900)
    cells, inside = torch.zeros(704, 1024), torch.zeros(704, 1024)
    cells[:700, :900], inside[:700, :900] = visible, 1
    seen, all_ = (x.view(11, 64, 8, 128).sum((1, 3)) for x in (cells, inside))
    partial = int(((seen > 0) & (seen < all_)).sum())
    assert mask.plan().numel() == operators.plan_bytes(700, 900, 1, 1, partial)
    assert ops.plan(mask).numel() == operators.plan_bytes(
        700, 900, 1, 1, operators.most_bit_tiles(700, 900, 1, 1, False, -1, -1)
    )


@cuda_only
def test_in_a_cuda_graph_with_new_contents():
    """A graph's plan has room for all tiles; its lists' contents change, of so many intervals."""
    column_ptr = torch.arange(0, 3 * KEYS + 1, 3, dtype=torch.int32)[None, None].to(DEVICE)
    intervals = torch.zeros(3 * KEYS, 2, dtype=torch.int32, device=DEVICE)
    x = tensors()
    flashmask_attention(*x, Mask(ROWS, KEYS, column_ptr=column_ptr, intervals=intervals))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashmask_attention(*x, Mask(ROWS, KEYS, column_ptr=column_ptr, intervals=intervals))
    for seed in range(3):
        begin = torch.randint(0, ROWS, (3 * KEYS,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        fresh = torch.stack((begin, begin + 9), 1).to(DEVICE)
        intervals.copy_(fresh)
        graph.replay()
        mask = Mask(ROWS, KEYS, column_ptr=column_ptr, intervals=fresh)
        assert torch.equal(out, flashmask_attention(*x, mask))


@cuda_only
def test_lists_of_anything_read_nothing_else():
    """Nothing waits to check a column_ptr on a GPU; numbers beside the intervals are none."""
    column_ptr = torch.tensor([[[-5, 2**31 - 1, -(2**31), 7, 3]]], dtype=torch.int32, device=DEVICE)
    mask = Mask(70, 4, column_ptr=column_ptr, intervals=torch.tensor([[1, 9]], dtype=torch.int32, device=DEVICE))
    flashmask_attention(*tensors(rows=70, keys=4), mask)
    torch.cuda.synchronize()


@cuda_only
def test_forwards_in_splits_refuse_them():
    mask, _ = lists_of(dilated, 200, 200)
    why = "the mask has interval lists|kernels 'sm8[06]' do not take it"
    with pytest.raises(UnsupportedError, match=why), torch.no_grad():
        ops.attention(*tensors(rows=200, keys=200), mask.replace(q_offset=0), split_size=128)


def test_memory_is_limited(monkeypatch):
    """By the argument, the environment variable, or a part of the device's memory, before any is asked for."""
    (q, k, v), (mask, _) = tensors(), lists_of(dilated)
    size = mask.column_ptr.nbytes + mask.intervals.nbytes + mask.plan().nbytes
    assert f"interval lists of {mask.column_ptr.nbytes + mask.intervals.nbytes} bytes" in flashmask.explain(
        q, k, v, mask
    )
    fresh = mask.replace()
    with pytest.raises(UnsupportedError, match=rf"{size} bytes; max_mask_bytes allows {size - 1} \(as asked for\)"):
        fresh.plan(max_mask_bytes=size - 1)
    with pytest.raises(ValueError, match="max_mask_bytes is -1"):
        fresh.plan(max_mask_bytes=-1)
    monkeypatch.setenv("FLASHMASK_MAX_MASK_BYTES", str(size - 1))
    with pytest.raises(UnsupportedError, match=rf"allows {size - 1} \(FLASHMASK_MAX_MASK_BYTES\)"):
        flashmask_attention(q, k, v, fresh)
    assert flashmask.explain(q, k, v, fresh).startswith("refused   the mask has interval lists of ")
    assert torch.equal(fresh.plan(max_mask_bytes=size), mask.plan())
    assert torch.equal(
        flashmask_attention(q, k, v, fresh), flashmask_attention(q, k, v, mask)
    )  # by the plans there are
    monkeypatch.setenv("FLASHMASK_MAX_MASK_BYTES", "1 GiB")
    with pytest.raises(ValueError, match="FLASHMASK_MAX_MASK_BYTES is '1 GiB'; it must be a number of bytes"):
        mask.replace().plan()


@cuda_only
def test_lists_elsewhere_are_refused():
    mask, _ = lists_of(dilated, device="cpu")
    with pytest.raises(ValueError, match="the mask is on cpu .*move the mask"):
        flashmask_attention(*tensors(), mask)


@pytest.mark.parametrize("rule", RULES)
def test_tiles(rule):
    mask, visible = lists_of(rule, 300, 400, "cpu")
    cells = torch.zeros(384, 512)
    cells[:300, :400] = visible
    inside = torch.zeros(384, 512)
    inside[:300, :400] = 1
    seen, all_ = (x.view(3, 128, 4, 128).sum((1, 3)) for x in (cells, inside))
    stats = mask.stats()
    assert (stats.visible, stats.tiles) == (int(visible.sum()), 12)
    assert stats.full_tiles == int((seen == all_).sum()) and stats.empty_tiles == int((seen == 0).sum())
    assert mask.plot().startswith("<svg") and f"{mask.intervals.shape[0]} hidden intervals" in repr(mask)


def test_composition():
    mask, visible = lists_of(dilated, device="cpu")
    other, others = lists_of(random_exclusions, device="cpu")
    causal = masks.causal(ROWS, KEYS)
    both = masks.intersect(mask, other)
    assert torch.equal(both.to_dense()[0, 0], visible & others)
    assert torch.equal(masks.intersect(mask, causal).to_dense(), mask.to_dense() & causal.to_dense())
    packed = masks.concatenate([mask, causal, other]).to_dense()[0, 0]
    matrices = (visible, causal.to_dense()[0, 0], others)
    assert torch.equal(packed, torch.block_diag(*(x.int() for x in matrices)).bool())
    assert torch.equal(masks.crop(mask, (17, 90), (60, 250)).to_dense()[0, 0], visible[17:90, 60:250])
    fits = masks.crop(mask, (0, 4), (0, KEYS))
    assert fits.column_ptr is None and torch.equal(fits.to_dense()[0, 0], visible[:4])


@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (30, 3), "q_offset": 5}])
def test_gather(band):
    mask = lists_of(wholly_random, device="cpu")[0].replace(q_offset=None, window=None, causal=False).replace(**band)
    dense = mask.to_dense()
    rows, keys = [(3, 40), (41, 130), (190, 200)], [(128, 264), (7, 30)]
    row, key = (torch.cat([torch.arange(*x) for x in segments]) for segments in (rows, keys))
    assert torch.equal(mask.gather(rows, keys).to_dense(), dense[:, :, row][:, :, :, key])
    assert torch.equal(mask.gather(rows).to_dense(), dense[:, :, row])
    blocked = mask.replace(block_mask=torch.tensor([[[[1, 0, 1], [1, 1, 0]]]]).bool())
    rows, keys = [(128, 200)], [(128, 256), (0, 128)]
    row, key = (torch.cat([torch.arange(*x) for x in segments]) for segments in (rows, keys))
    assert torch.equal(blocked.gather(rows, keys).to_dense(), blocked.to_dense()[:, :, row][:, :, :, key])


def test_flex_attention_sees_the_same():
    from torch.nn.attention.flex_attention import create_mask

    visible = torch.stack([neighbourhoods(ROWS, KEYS), dilated(ROWS, KEYS)])[None]
    mask = masks.from_dense(visible)
    block_mask = mask.to_block_mask(heads=HEADS, batch=2)
    got = create_mask(block_mask.mask_mod, 2, HEADS, ROWS, KEYS, device="cpu")
    assert torch.equal(got, visible.repeat_interleave(HEADS // 2, 1).expand(2, -1, -1, -1))
    blocks = torch.nn.functional.pad(visible, (0, 120, 0, 56)).view(1, 2, 2, 128, 3, 128).any(5).any(3)
    assert torch.equal(block_mask.to_dense().bool(), blocks.repeat_interleave(HEADS // 2, 1).expand(2, -1, -1, -1))
    assert torch.equal(masks.from_dense(got).to_dense(), got)


def test_a_copy_is_the_same_mask(tmp_path):
    mask, visible = lists_of(bigbird, device="cpu")
    torch.save(mask, tmp_path / "mask.pt")
    for copy in (pickle.loads(pickle.dumps(mask)), torch.load(tmp_path / "mask.pt", weights_only=True)):
        assert torch.equal(copy.to_dense()[0, 0], visible)
        assert torch.equal(copy.plan("cpu"), mask.plan("cpu"))
    leaves, tree = torch.utils._pytree.tree_flatten(mask)
    again = torch.utils._pytree.tree_unflatten(leaves, tree)
    assert len(leaves) == 2 and torch.equal(again.to_dense(), mask.to_dense())


def test_compiled_and_mapped():
    mask, visible = lists_of(dilated)
    q, k, v = tensors()
    want = flashmask_attention(q, k, v, mask)
    assert torch.equal(torch.compile(flashmask_attention, backend="eager", fullgraph=True)(q, k, v, mask), want)
    mapped = torch.vmap(lambda *x: flashmask_attention(*x, mask))(*(x[None].expand(2, *x.shape) for x in (q, k, v)))
    assert torch.equal(mapped[1], want)


def test_a_change_in_place_is_noticed():
    mask, _ = lists_of(dilated)
    tensors_ = tensors()
    flashmask_attention(*tensors_, mask)
    mask.intervals[0, 1] = 0
    with pytest.raises(RuntimeError, match="changed in place"):
        flashmask_attention(*tensors_, mask)


def test_lists_that_fit_two_are_taken_as_bounds():
    """The plan and the results have the bits of the bounds that say the same."""
    bounds = torch.randint(0, 60, (1, 1, KEYS, 4), dtype=torch.int32).cumsum(-1).int()
    column_ptr = torch.arange(0, 2 * KEYS + 1, 2, dtype=torch.int32)[None, None]
    mask = Mask(
        ROWS,
        KEYS,
        column_ptr=column_ptr,
        intervals=bounds.view(-1, 2).flip(0).view(KEYS, 2, 2).flip(0, 1).reshape(-1, 2),
    ).to(DEVICE)
    same = Mask(ROWS, KEYS, bounds=bounds).to(DEVICE)
    assert torch.equal(mask.to_dense(), same.to_dense())
    x = tensors()
    assert torch.equal(flashmask_attention(*x, mask), flashmask_attention(*x, same))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"column_ptr": torch.zeros(1, 1, 5).int()}, ValueError, "intervals is None and column_ptr is given"),
        ({"intervals": torch.zeros(1, 2).int()}, ValueError, "column_ptr is None and intervals is given"),
        ({"column_ptr": torch.zeros(1, 1, 5), "intervals": torch.zeros(1, 2).int()}, TypeError, "float32.*int32"),
        ({"column_ptr": torch.zeros(1, 1, 4).int(), "intervals": torch.zeros(1, 2).int()}, ValueError, "1, 5"),
        ({"column_ptr": torch.zeros(1, 1, 5).int(), "intervals": torch.zeros(1, 3).int()}, ValueError, r"\[n, 2\]"),
        ({"column_ptr": [0], "intervals": torch.zeros(1, 2).int()}, TypeError, "column_ptr is a list"),
    ],
)
def test_wrong_lists(given, error, words):
    with pytest.raises(error, match=words):
        Mask(6, 4, **given)
    with pytest.raises(ValueError, match="both given"):
        Mask(
            6,
            4,
            bounds=torch.zeros(1, 1, 4, 2).int(),
            column_ptr=torch.zeros(1, 1, 5).int(),
            intervals=torch.zeros(0, 2).int(),
        )


def test_wrong_contents_are_named():
    mask = Mask(6, 2, column_ptr=torch.tensor([[[0, 2, 1]]]).int(), intervals=torch.zeros(2, 2).int())
    with pytest.raises(ValueError, match=r"column_ptr of \(batch 0, head 0, column 1\) is 2 and the next one 1"):
        mask.plan("cpu")
    for ends in ([0, 2, 1], [-1, 0, 0], [0, 0, 3]):
        with pytest.raises(ValueError, match=r"column_ptr must ascend within \[0, 2\]"):
            mask.replace(column_ptr=torch.tensor([[ends]]).int()).to_dense()


def test_what_takes_no_lists_says_so():
    mask, _ = lists_of(dilated, 64, 64, "cpu")
    with pytest.raises(UnsupportedError, match="interval lists"):
        SequenceMask.from_mask(mask)
    with pytest.raises(flashmask.UnrepresentableMaskError, match="does not fit two row intervals"):
        mask.to_startend()
