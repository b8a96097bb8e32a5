# SPDX-License-Identifier: Apache-2.0
"""The promises of docs/inference.md, Equal bits: L0, the same call has the same bits; L1, a request has them whatever
else is in the batch and wherever its keys lie; L2, a row has them however many rows its call has, in training too.

Every comparison is of bits. GPUs have all three by Hopper's kernels.
"""

import hashlib
import json
import os
from pathlib import Path

import flashmask
import pytest
import torch
from devices import DEVICE, DTYPE, ON_CUDA, cpu_only, cuda_only
from flashmask import flashmask_attention, flashmask_varlen_func, flashmask_with_kvcache, masks
from flashmask.errors import UnsupportedError
from flashmask.inference import KvCache, SequenceMask

pytestmark = pytest.mark.skipif(
    ON_CUDA and os.environ.get("FLASHMASK_KERNELS", "auto") not in ("auto", "sm90"), reason="they promise L1 alone"
)

N, HEADS, HEADS_KV, DIM, DIM_V = 1030, 4, 2, 40, 24
SPLIT = 256
SPLITS = dict(split_size=SPLIT, batch_invariant=True)
DTYPES = (torch.bfloat16, torch.float16) if ON_CUDA else (torch.float32, torch.bfloat16, torch.float16)


def slopes():
    return torch.rand(HEADS, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def sinks():
    return torch.linspace(-2.0, 2.0, HEADS, device=DEVICE)


# The mask and options of a training call, and the mask over a cache that means the same.
CALLS = {
    "causal": (dict(causal=True), SequenceMask(), {}),
    "window": (dict(causal=True, window_size=(99, 0)), SequenceMask(window_size=(99, 0)), {}),
    "softcap": (dict(causal=True), SequenceMask(), dict(softcap=3.0)),
    "alibi": (dict(causal=True), SequenceMask(), dict(alibi_slopes=slopes())),
    "sink": (dict(causal=True), SequenceMask(), dict(sink=sinks())),
    "documents": (masks.causal_document(seqlens=[120, 300, N - 420], device=DEVICE), None, {}),
    "all": (
        masks.causal_document(seqlens=[500, N - 500], device=DEVICE).replace(window=(300, 0)),
        None,
        dict(softcap=5.0, alibi_slopes=slopes(), sink=sinks(), softmax_scale=0.3),
    ),
}


def draw(n, dtype=DTYPE, seed=0, batch=1):
    torch.manual_seed(seed)
    shapes = (HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V)
    return [torch.randn(batch, n, heads, dim).to(DEVICE, dtype) for heads, dim in shapes]


def same(results, others):
    """True if two lists of tensors have the same bits."""
    pairs = list(zip(results, others, strict=True))
    assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)
    return all(torch.equal(*(z.contiguous().view(torch.uint8) for z in pair)) for pair in pairs)


def as_pages(x, page_size, order):
    """x [batch, n, heads, dim] in pages of an order, with NaN where no key is."""
    batch, n = x.shape[:2]
    per_request = -(-n // page_size)
    padded = torch.full((batch, per_request * page_size, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)
    padded[:, :n] = x
    pages = torch.full((len(order), page_size, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)
    pages[order[: batch * per_request]] = padded.view(batch * per_request, page_size, *x.shape[2:])
    return pages, order[: batch * per_request].view(batch, per_request).int()


def paged(k, v, page_size=16, seed=0):
    order = torch.randperm(k.shape[0] * -(-k.shape[1] // page_size) + 3, generator=torch.Generator().manual_seed(seed))
    order = order.to(k.device)
    (k, table), (v, _) = as_pages(k, page_size, order), as_pages(v, page_size, order)
    return KvCache(k, v, table.to(k.device), torch.zeros(len(table), dtype=torch.int32, device=k.device))


def in_chunks(q, cache, rows, first=0, **options):
    """[out, lse] of a sequence's rows from `first` on, `rows` to a call."""
    outs, lses = [], []
    for begin in range(first, q.shape[1], rows):
        chunk = q[:, begin : begin + rows]
        cache.seqlens.fill_(begin + chunk.shape[1])
        out, lse = flashmask_with_kvcache(chunk, cache, return_softmax_lse=True, **SPLITS, **options)
        outs.append(out)
        lses.append(lse)
    return [torch.cat(outs, 1), torch.cat(lses, 2)]


def over_cache(name):
    mask, sequence_mask, options = CALLS[name]
    return dict(mask=sequence_mask or SequenceMask.from_mask(mask), **options)


def in_training(name, q, k, v, **others):
    """[out, lse] of flashmask_attention with split_size."""
    mask, _, options = CALLS[name]
    mask = mask if isinstance(mask, dict) else dict(startend_row_indices=mask)
    given = dict(split_size=SPLIT, **mask, **options) | others
    return list(flashmask_attention(q, k, v, return_softmax_lse=True, **given))


def draw_by_index(n, heads, dim, seed):
    """[1, n, heads, dim] of values in [-2, 2) that no version of a generator changes."""
    mixed = torch.arange(n * heads * dim, dtype=torch.int64) + (seed << 32)
    for _ in range(3):
        mixed = mixed * 0x5851F42D4C957F2D + 0x14057B7EF767814F
        mixed ^= mixed >> 31
    return ((mixed >> 24 & 0xFFFF).float() / 16384 - 2).view(1, n, heads, dim).to(DEVICE)


def digest(results):
    text = hashlib.sha256()
    for x in results:
        text.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return text.hexdigest()


@cuda_only
@pytest.mark.parametrize("name", CALLS)
def test_every_hopper_gpu(name):
    """L2: the bits of another GPU of Hopper's, whose results equal_bits_hopper.json has. FLASHMASK_RECORD_BITS names a
    file that gets this GPU's instead, after a change of the kernels' arithmetic."""
    digests = {}
    for dtype in DTYPES:
        for dim, dim_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
            sizes = (HEADS, dim), (HEADS_KV, dim), (HEADS_KV, dim_v)
            tensors = [draw_by_index(N, *size, seed).to(dtype) for seed, size in enumerate(sizes)]
            digests[f"{name}, {str(dtype)[6:]}, {dim}/{dim_v}"] = digest(in_training(name, *tensors))
    if record := os.environ.get("FLASHMASK_RECORD_BITS"):
        recorded = json.loads(Path(record).read_text()) if Path(record).exists() else {}
        Path(record).write_text(json.dumps(recorded | digests | {"device": torch.cuda.get_device_name()}, indent=1))
        return
    recorded = json.loads((Path(__file__).parent / "equal_bits_hopper.json").read_text())
    assert digests == {case: recorded[case] for case in digests}, f"other bits than on {recorded['device']}"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_calls_of_any_size(name, dtype):
    """L2: decode, verification, chunks, prefill and training. The masks of N rows are those of every prefix."""
    q, k, v = draw(N, dtype)
    cache = paged(k, v)
    whole = in_chunks(q, cache, N, **over_cache(name))
    for rows in (7, 64, 1000):
        assert same(in_chunks(q, cache, rows, **over_cache(name)), whole), rows
    first = 0 if dtype == torch.bfloat16 else N - 150
    decoded = in_chunks(q, cache, 1, first, **over_cache(name))
    assert same(decoded, [whole[0][:, first:], whole[1][..., first:]])
    assert same(in_training(name, q, k, v), whole)


@pytest.mark.parametrize("name", CALLS)
def test_the_option_does_something(name):
    """Without splits the bits are others, and so are those of other splits: the tests above can fail."""
    q, k, v = draw(N)
    whole = in_training(name, q, k, v)
    plain = in_training(name, q, k, v, split_size=None)
    assert not same(whole, plain)
    tolerance = 2e-2 if ON_CUDA else 2e-5
    torch.testing.assert_close(whole, plain, atol=tolerance, rtol=tolerance)
    assert same(plain, in_training(name, q, k, v, split_size=0))
    assert not same(in_training(name, q, k, v, split_size=128), whole) or name == "documents"


def test_positions_and_block_masks():
    """L2 under positions, of which ALiBi makes use, and under blocks of keys."""
    q, k, v = draw(N, torch.bfloat16)
    q_pos = torch.arange(N, dtype=torch.int32, device=DEVICE)[None] // 2 + 5
    k_pos = torch.arange(N, dtype=torch.int32, device=DEVICE)[None] * 2 // 3
    options = dict(alibi_slopes=slopes(), return_softmax_lse=True)
    training = options | dict(split_size=SPLIT, causal=True)
    got = flashmask_attention(q, k, v, window_size=(200, 0), q_pos=q_pos, k_pos=k_pos, **training)
    mask = SequenceMask(window_size=(200, 0), q_pos=q_pos, k_pos=k_pos)
    assert same(got, flashmask_with_kvcache(q, KvCache(k, v), mask, **options, **SPLITS))

    blocks = (torch.rand(1, HEADS_KV, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.6).to(DEVICE)
    got = flashmask_attention(q, k, v, block_mask=blocks, **training)
    assert same(got, flashmask_with_kvcache(q, KvCache(k, v), SequenceMask(block_mask=blocks), **options, **SPLITS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages(dtype):
    """L1: page sizes and orders."""
    q, k, v = draw(300, dtype)
    want = in_chunks(q, paged(k, v), 300)
    for page_size, seed in ((1, 1), (3, 2), (16, 3), (128, 4), (300, 5)):
        assert same(in_chunks(q, paged(k, v, page_size, seed), 300), want), page_size


def test_a_request_alone_and_among_others():
    """L1, with requests that are empty, have no rows, and have as many rows as keys."""
    torch.manual_seed(0)
    n, m = 700, 5
    q, k, v = draw(n)
    want = in_chunks(q, paged(k, v), n)
    for neighbours in ([], [0], [0, 9, 0, 33], [9, 600, 2, 31], [650] * 6):
        lengths = [n, *neighbours]
        parts = [(k, v), *(draw(n, seed=1 + x)[1:] for x in neighbours)]
        cache = paged(*(torch.cat(x) for x in zip(*parts)), seed=len(lengths))
        cache.seqlens.copy_(torch.tensor(lengths))
        rows = [m, *(min(x, 9) for x in neighbours)]
        packed = torch.cat([q[0, -m:], torch.randn(sum(rows) - m, HEADS, DIM).to(q)])
        ends = torch.tensor([0, *rows], device=DEVICE).cumsum(0).int()
        options = dict(cu_seqlens_q=ends, return_softmax_lse=True, **SPLITS)
        out, lse = flashmask_with_kvcache(packed, cache, **options)
        assert same([out[None, :m], lse[None, :, :m]], [want[0][:, -m:], want[1][..., -m:]]), neighbours


def test_neighbours_that_grow():
    """L1: the others go from 9 to 10 tokens."""
    torch.manual_seed(0)
    k, v = (torch.randn(4, 32, HEADS_KV, d).to(DEVICE, DTYPE) for d in (DIM, DIM_V))
    q = torch.randn(4, 1, HEADS, DIM).to(DEVICE, DTYPE)
    cache = paged(k, v)

    def decode(others):
        cache.seqlens.copy_(torch.tensor([others, 20, others, others]))
        return flashmask_with_kvcache(q, cache, return_softmax_lse=True, split_size=128, batch_invariant=True)

    (before, lse_before), (after, lse_after) = decode(9), decode(10)
    assert same([before[1], lse_before[1]], [after[1], lse_after[1]])
    assert not torch.equal(before[0], after[0])


def test_training_in_any_batch():
    """L1 and L2 of training: neighbours, padding after a sequence and threads change no bit."""
    lengths = (700, 1, 0, 333)
    parts = [draw(700, torch.bfloat16, seed=n) for n in range(4)]
    for part, n in zip(parts, lengths):
        for x in part:
            x[:, n:] = 0 if ON_CUDA else float("nan")  # a GPU's padding is finite with splits
    ends = torch.tensor(lengths)[:, None]
    hidden_from = torch.where(torch.arange(700) < ends, ends, 0).int()[:, None, :, None].to(DEVICE)
    q, k, v = (torch.cat(x) for x in zip(*parts))
    together = in_training("causal", q, k, v, startend_row_indices=hidden_from)
    for b, (part, n) in enumerate(zip(parts, lengths)):
        alone = in_training("causal", *(x[:, :n] for x in part))
        assert same([together[0][b, None, :n], together[1][b, None, :, :n]], alone), n


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype):
    """They are those of the plain call but for rounding, and L0."""
    mask, _, options = CALLS["all"]
    leaves = [x.requires_grad_() for x in (*draw(N, dtype), options["sink"].clone())]
    dout = torch.randn(1, N, HEADS, DIM_V).to(DEVICE, dtype)

    def gradients(split_size):
        given = options | dict(sink=leaves[3], split_size=split_size, return_softmax_lse=True)
        out, lse = flashmask_attention(*leaves[:3], mask, **given)
        return torch.autograd.grad([out, lse.float()], leaves, [dout, torch.ones_like(lse)])

    got, want = gradients(SPLIT), gradients(None)
    assert ON_CUDA or same(got, gradients(SPLIT))  # dq there is added up in any order
    assert not same(got, want)
    for x, y in zip(got, want):
        assert (x - y).abs().max() <= TOLERANCES[dtype] * y.abs().max()


def test_documents_of_a_packed_batch():
    """One that begins at a multiple of split_size has the bits that it has alone."""
    q, k, v = (x[0] for x in draw(900))
    ends = [0, 2 * SPLIT, 2 * SPLIT + 140, 900]
    options = dict(causal=True, return_softmax_lse=True, split_size=SPLIT)
    out, lse = flashmask_varlen_func(q, k, v, ends, ends, **options)
    for begin, end, is_aligned in zip(ends, ends[1:], (True, True, False)):
        alone = in_training("causal", *(x[None, begin:end] for x in (q, k, v)))
        assert same([out[None, begin:end], lse[None, :, begin:end]], alone) == is_aligned, begin


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(split_size=100), ValueError, "split_size is 100; it must be 0 .none. or a multiple of 128"),
        (dict(split_size=2**31), ValueError, "split_size is 2147483648"),
        (dict(split_size=-128), ValueError, "split_size is -128"),
        (dict(split_size=128.0), TypeError, "split_size is 128.0"),
        (dict(split_size=128, dropout=0.1), UnsupportedError, "cpu: dropout is not taken beside split_size"),
        (
            dict(split_size=128, backend="reference"),
            UnsupportedError,
            "split_size is 128; backends 'cpu' and 'cuda' take it",
        ),
    ],
)
@cpu_only("what a GPU refuses is below")
def test_refusals(options, error, text):
    with pytest.raises(error, match=text):
        flashmask_attention(*draw(20), **options)


@cuda_only
def test_refusals_of_a_gpu():
    q, k, v = draw(20)
    with pytest.raises(UnsupportedError, match="dropout 0.1; leave out one"):
        flashmask_attention(q, k, v, split_size=128, dropout=0.1)
    with pytest.raises(UnsupportedError, match="q has 5 rows and k 20; a GPU's have to be as many"):
        flashmask_attention(q[:, :5], k, v, split_size=128)
    with pytest.raises(UnsupportedError, match="the mask has 4 heads; it must have 1 or 2, those of keys"):
        of_heads = torch.full((1, HEADS, 20, 1), 20, dtype=torch.int32, device=DEVICE)
        flashmask_attention(q, k, v, of_heads, causal=True, split_size=128)


@cpu_only("its words")
def test_explain():
    text = flashmask.explain(*draw(20), split_size=384)
    assert "keys in splits of 384" in text and "with split_size" in text
    text = flashmask.explain(*draw(20), split_size=384, dropout=0.5)
    assert "nearest   leave out split_size" in text
