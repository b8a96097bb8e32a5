# SPDX-License-Identifier: Apache-2.0
"""Builders of masks: the families of the C++ library, from tensors on any device.

i is a query row, j a key. Every builder is made of torch operations alone: it waits for no device and can be traced by
torch.compile (from_dense excepted, which reads the matrix). Lists and tensors of integers are taken alike; lists go to
`device`, torch's default device if it is not given. Where an argument is [..., n], leading dimensions are the mask's
batch and heads.

Values in host memory are checked, and a wrong one is a ValueError: so are documents that go beyond `seqlen`. Values on
a device are not read; the masks of wrong ones are wrong, but harmless. The exceptions are hash_sparse and prefix_tree,
whose check stays in the device's work (torch's asynchronous assertion).

Documents are packed one after the other, and given as exactly one of
    cu_seqlens    [..., documents + 1]  0, then the end of each document
    seqlens       [..., documents]      their lengths; 0 is legal
    doc_ids       [..., seqlen]         an id per token; a run of equal ids is a document, and an id must not come back
    position_ids  [..., seqlen]         a position per token; a document begins wherever it is not the one before plus 1
With cu_seqlens and seqlens, `seqlen` is the length of the mask. It can be left out where the lengths are in host
memory, and is then their sum. If it is more, the tokens past the last document see nothing and are not seen.
"""

import torch

from . import _arguments, _columns
from .errors import UnrepresentableMaskError
from .mask import Mask

__all__ = [
    "attention_sink_window",
    "block_causal",
    "block_diffusion",
    "causal",
    "causal_blockwise",
    "causal_document",
    "causal_with_blocks",
    "dflash",
    "document",
    "eagle3_ttt",
    "eviction",
    "from_dense",
    "from_startend",
    "full",
    "global_sliding_window",
    "hash_sparse",
    "padding",
    "prefix_lm_causal",
    "prefix_lm_document",
    "prefix_tree",
    "prefix_tree_from_intervals",
    "qk_sparse",
    "random_eviction",
    "shared_question",
    "sliding_window",
]


# --- Masks that are only a band -----------------------------------------------------------------------


def full(seqlen_q, seqlen_k=None):
    """Every row sees every key. seqlen_k: default seqlen_q."""
    return Mask(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)


def causal(seqlen_q, seqlen_k=None, q_offset=None):
    """j <= i + q_offset. seqlen_k: default seqlen_q. q_offset: default seqlen_k - seqlen_q."""
    return Mask(seqlen_q, seqlen_q if seqlen_k is None else seqlen_k, causal=True, q_offset=q_offset)


def sliding_window(seqlen_q, seqlen_k, left, right=0, q_offset=None):
    """i + q_offset - left <= j <= i + q_offset + right; -1 (None, sys.maxsize) is unbounded.

    A window of w keys that ends with the row itself is left = w - 1.
    """
    return Mask(seqlen_q, seqlen_k, window=(left, right), q_offset=q_offset)


# --- Documents ----------------------------------------------------------------------------------------


def causal_document(cu_seqlens=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None):
    """Same document and j <= i: packed pretraining and fine-tuning."""
    documents = _Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    return _mask(documents.seqlen, documents.end, causal=True)


def document(cu_seqlens=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None):
    """Same document, in both directions."""
    documents = _Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    return _mask(documents.seqlen, documents.end, documents.begin)


def prefix_lm_document(
    cu_seqlens=None, prefix=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None
):
    """Same document, and j <= i or j among its first prefix[document] tokens. prefix: [..., documents]."""
    documents = _Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    if prefix is None:
        raise ValueError("prefix is missing; it must be integers, one for each document")
    prefix = _arguments.integers("prefix", prefix, documents.begin.device)
    own = _prefix_of_token(prefix, documents)
    length = documents.end - documents.begin
    _arguments.check_values(
        "prefix of the document of token",
        own,
        (own >= 0) & (own <= length),
        "it must be between 0 and the document's length",
    )
    key = documents.position
    return _mask(documents.seqlen, documents.end, torch.where(key - documents.begin < own, documents.begin, key))


def _prefix_of_token(prefix, documents):
    """prefix[document] of each token; 0 past the last document."""
    padded = torch.nn.functional.pad(prefix, (0, 1)).expand(*documents.index.shape[:-1], -1)
    if documents.count is not None and prefix.shape[-1] != documents.count:
        raise ValueError(
            f"prefix has {prefix.shape[-1]} entries; it needs one for each of the {documents.count} documents"
        )
    return padded.gather(-1, documents.index.clamp(max=prefix.shape[-1]))


def causal_blockwise(cu_seqlens=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None):
    """j <= i, and j in i's own block or i in the last block: separate examples, and a test example that sees them all.

    The blocks are given like documents; tokens past the last block belong to it.
    """
    blocks = _Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    # Keys of the last block: the interval that begins at seqlen is empty.
    seen_to_end = blocks.position >= blocks.last_begin
    return _mask(blocks.seqlen, torch.where(seen_to_end, blocks.seqlen, blocks.end), blocks.last_begin, causal=True)


def shared_question(groups=None, *, seqlens=None, is_question=None, seqlen=None, device=None):
    """DPO and reward models: j <= i, same group, and j in the question or in i's own answer.

    groups: [(question, [answer, ...]), ...] in tokens. Or, as tensors, seqlens [..., segments], the lengths of all
    questions and answers in their order, and is_question bool [..., segments], which is True where a group begins.
    """
    if groups is not None:
        if seqlens is not None or is_question is not None:
            raise ValueError("groups is given together with seqlens or is_question; one of the two forms is accepted")
        seqlens, is_question = _segments_of(groups)
    if seqlens is None or is_question is None:
        raise ValueError("give groups, or both seqlens and is_question")
    segments = _Documents(None, seqlens, None, None, seqlen, device)
    is_question = _arguments.flags("is_question", is_question, segments.begin.device)
    if is_question.shape[-1] != segments.count:
        raise ValueError(
            f"is_question has {is_question.shape[-1]} entries; it needs one for each of the {segments.count} segments"
        )
    total = segments.cu_seqlens[..., -1:]
    # A question is seen to the end of its group, where the next one begins; an answer to its own end.
    group_end = _next_flagged(is_question, segments.cu_seqlens[..., :-1], total)
    seen_until = torch.where(is_question, group_end, segments.cu_seqlens[..., 1:])
    return _mask(segments.seqlen, torch.cat([seen_until, total], -1).gather(-1, segments.index), causal=True)


def _segments_of(groups):
    """(lengths, is_question) of all questions and answers in their order."""
    try:
        pairs = [(question, list(answers)) for question, answers in groups]
    except (TypeError, ValueError):
        raise TypeError(
            f"groups is {_arguments.given(groups)}; it must be [(question, [answer, ...]), ...], lengths in tokens"
        ) from None
    lengths = [length for question, answers in pairs for length in (question, *answers)]
    return lengths, [flag for _, answers in pairs for flag in (True, *(False for _ in answers))]


def attention_sink_window(
    sink, window, cu_seqlens=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None
):
    """The last `window` keys, the row's own included, and the document's first `sink` keys (arXiv:2309.17453).

    StreamingLLM: same document, j <= i, and i - j < window or j among the first `sink` tokens of the document.
    window: an int of at least 1, or -1 for all keys before. seqlen alone is one document of all.
    """
    sink = _arguments.integer("sink", sink, 0)
    documents = _documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    key, end = documents.position, documents.end
    until = torch.minimum(key + _reach(window, documents.seqlen), end)
    return _mask(documents.seqlen, torch.where(key - documents.begin < sink, end, until), causal=True)


def block_causal(
    blocks, cu_seqlens=None, *, window=-1, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None
):
    """Frames of a video, chunks of a stream: a token sees its whole block and the earlier ones, `window` blocks in all.

    Same document, block(j) <= block(i), and block(i) - block(j) < window. blocks: an int, the length of every block,
    counted from where the document begins; or their lengths [..., blocks], tokens past the last being hidden. Where a
    block goes on from one document to the next, each has its part. window: an int of at least 1, or -1 for all blocks
    before. Without documents the sequence is one: seqlen tokens, by default the sum of blocks.
    """
    documents = _documents_of_blocks(blocks, cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    begin, until = _block_bounds(blocks, documents, window)
    return _mask(documents.seqlen, until, begin)


def _documents_of_blocks(blocks, cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device):
    """The documents given, or one of all blocks."""
    if isinstance(blocks, torch.Tensor) and device is None:
        device = blocks.device
    if not _is_one_length(blocks) and all(given is None for given in (cu_seqlens, seqlens, doc_ids, position_ids)):
        seqlen = _Documents(None, blocks, None, None, seqlen, device, name="blocks").seqlen
    return _documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)


def _block_bounds(blocks, documents, window):
    """Where each token's block begins, and the first block that does not see it, both within its document."""
    begin, until = (_equal_blocks if _is_one_length(blocks) else _blocks)(blocks, documents, window)
    return torch.maximum(begin, documents.begin), torch.minimum(until, documents.end)


def _is_one_length(blocks):
    """Whether blocks are of one length, and not a list or a tensor of lengths."""
    return not hasattr(blocks, "__len__")


def _equal_blocks(length, documents, window):
    """Where each token's block begins, and where the first block begins that does not see it."""
    length = _arguments.integer("blocks", length, 1, rule="a block must have at least 1 token")
    length = min(length, max(documents.seqlen, 1))
    begin = documents.position - (documents.position - documents.begin) % length
    return begin, begin + _reach(window, documents.seqlen) * length


def _blocks(lengths, documents, window):
    """The same of blocks of these lengths."""
    blocks = _Documents(None, lengths, None, None, documents.seqlen, documents.begin.device, name="blocks")
    later = (blocks.index + _reach(window, blocks.count)).clamp(max=blocks.count)
    return blocks.begin, blocks.cu_seqlens.gather(-1, later)


def causal_with_blocks(
    block_ids, cu_seqlens=None, *, window=-1, seqlens=None, doc_ids=None, position_ids=None, device=None
):
    """Images in a vision-language model's text: causal, except that a block's tokens see each other both ways.

    Same document, and j <= i and i - j < window, or j in i's own block (Gemma 3, arXiv:2503.19786, in its layers with
    and without a window). block_ids: [..., seqlen], an id per token, negative outside of blocks; ids may be used again
    in another document. window: an int of at least 1, or -1 for all keys before; it does not cut blocks. Without
    documents the sequence is one.

    The tokens of a block must be contiguous: a key of a block in parts is hidden from the rows between each two of
    them. from_dense takes such a mask if it fits two intervals; one block around all of the parts always does.
    """
    block_ids = _arguments.integers("block_ids", block_ids, device, "[..., seqlen]")
    documents = _documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, block_ids.shape[-1], block_ids.device)
    key = documents.position.expand(torch.broadcast_shapes(block_ids.shape, documents.position.shape))
    block_ids = block_ids.expand(key.shape)
    begins = key == documents.begin
    begins[..., 1:] |= block_ids[..., 1:] != block_ids[..., :-1]
    inside = block_ids >= 0
    _check_blocks(block_ids, begins & inside, documents.index.expand(key.shape))
    begin = torch.where(begins, key, 0).cummax(-1).values
    end = _next_flagged(begins, key, key.new_full((1,), documents.seqlen))
    until = torch.maximum(torch.where(inside, end, key + 1), key + _reach(window, documents.seqlen))
    return _mask(documents.seqlen, torch.minimum(until, documents.end), torch.where(inside, begin, key))


def block_diffusion(
    blocks,
    cu_seqlens=None,
    *,
    order="interleaved",
    seqlens=None,
    doc_ids=None,
    position_ids=None,
    seqlen=None,
    device=None,
):
    """Training of block diffusion language models: a noisy and a clean copy of a text of `seqlen` tokens.

    BD3-LM (arXiv:2503.09573, appendix B.6): same document, and j clean in an earlier block than i's, or i and j of the
    same copy of one block. blocks and documents: of one copy, as for block_causal.

    Returns (mask, order): order int64 [..., 2 * seqlen] says which token of [x_t | x_0], the noisy copy and then the
    clean one, stands at each place of the masked sequence. Gather the embeddings by it; positions are order % seqlen,
    and what is noisy has order < seqlen.

    order: "interleaved", each block's noisy copy and then its clean one, which fits whatever the packing. Or
    "concatenated", which leaves [x_t | x_0] as it is: a clean key is then seen by a run of rows in each half, and a
    document of several blocks that another one (or hidden tokens) follows is an UnrepresentableMaskError.
    """
    _arguments.choice("order", order, ("interleaved", "concatenated"))
    documents = _documents_of_blocks(blocks, cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    begin, end = _block_bounds(blocks, documents, 1)
    _, until = _block_bounds(blocks, documents, -1)
    build = _interleaved_diffusion if order == "interleaved" else _concatenated_diffusion
    return build(documents, *torch.broadcast_tensors(begin, end, until, documents.position))


def _interleaved_diffusion(documents, begin, end, until, token):
    """Of each token: where its block begins and ends, and until where its document goes on. Hidden tokens come last."""
    total, visible = documents.seqlen, end > token
    shown = visible.sum(-1, keepdim=True)
    # Both copies of what comes before a block lie before it; the hidden tokens are laid out as one more block.
    noisy, clean = token + torch.where(visible, begin, shown), token + torch.where(visible, end, total)
    place = torch.cat([noisy, clean], -1)
    order = torch.empty_like(place).scatter_(
        -1, place, torch.arange(2 * total, device=place.device).expand(place.shape)
    )
    seen_from = torch.cat([2 * begin, begin + end], -1)
    seen_until = torch.cat([begin + end, 2 * until], -1)
    hidden = ~torch.cat([visible, visible], -1)
    vectors = [torch.where(hidden, 0, vector).gather(-1, order) for vector in (seen_until, seen_from)]
    return _mask(2 * total, *vectors), order


def _concatenated_diffusion(documents, begin, end, until, token):
    """The same of [x_t | x_0] as it is."""
    total, visible = documents.seqlen, end > token
    last = end == until  # no later block sees it: the rows before its own clean copy are one run
    need = torch.where(visible & ~last & (until < total), 3, 2)
    _check_fits(
        torch.cat([torch.full_like(need, 2), need], -1),
        "the block-diffusion mask in the order 'concatenated'",
        "the order 'interleaved' fits every packing",
    )
    none, rows = torch.zeros_like(begin), torch.full_like(begin, 2 * total)
    first = torch.cat([begin, torch.where(last, total + begin, end)], -1)
    lts = torch.cat([end, torch.where(last, total + until, until)], -1)
    lte = torch.cat([rows, torch.where(last, rows, total + begin)], -1)
    hidden = ~torch.cat([visible, visible], -1)
    mask = _mask(
        2 * total, torch.where(hidden, 0, lts), torch.where(hidden, 2 * total, lte), torch.cat([none, none], -1), first
    )
    return mask, torch.arange(2 * total, device=begin.device).expand(lts.shape)


def eagle3_ttt(steps, cu_seqlens=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None):
    """The last of `steps` passes of EAGLE-3's training-time test: the draft model reads its own predictions.

    Each pass appends a key for every token: seqlen rows, steps * seqlen keys (arXiv:2503.01840, section 3.2).
    j < seqlen: same document and j <= i; keys of later passes: i's own token, j % seqlen == i. steps: an int of at
    least 1, which is causal_document. seqlen alone is one document of all.
    """
    steps = _arguments.integer("steps", steps, 1)
    documents = _documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    token, end = documents.position, documents.end
    own = torch.where(end > token, token + 1, 0)
    return _mask(documents.seqlen, torch.cat([end] + [own] * (steps - 1), -1), torch.cat([token] * steps, -1))


def dflash(anchors, block, cu_seqlens=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None):
    """Training of DFlash's draft model: blocks are denoised from the context before their anchors.

    Rows and the last keys are the blocks', block tokens for each anchor; the first seqlen keys are the context's, which
    has no rows (arXiv:2602.06036, section 4.2). j in the context: j < anchor of i's block, in the anchor's document;
    otherwise: j in i's own block. seqlen alone is one document of all.

    anchors: [..., blocks], ascending, as only then do the blocks that see a key follow each other and the mask fits two
    intervals. seqlen is the place after the context; it belongs to the document of the last token. Negative ones,
    after all others, are blocks that are not there, to fill up rows of a batch: they see nothing and are not seen.
    """
    block = _arguments.integer("block", block, 1)
    anchors = _arguments.integers("anchors", anchors, device, "[..., blocks]")
    documents = _documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, anchors.device)
    context, there = documents.seqlen, anchors >= 0
    _check_anchors(anchors, there, context)
    lead = torch.broadcast_shapes(anchors.shape[:-1], documents.end.shape[:-1])
    batched = lambda values: values.expand(*lead, -1).contiguous()  # noqa: E731
    at = batched(torch.where(there, anchors, context + 1))  # no key and no document is after that
    first = torch.searchsorted(at, batched(documents.position), right=True)
    last = torch.searchsorted(torch.where(at == context, context - 1, at), batched(documents.end))
    row = _positions(anchors.shape[-1] * block, anchors)
    begin, own = row - row % block, there.repeat_interleave(block, -1)
    lts = torch.cat([last * block, batched(torch.where(own, begin + block, 0))], -1)
    return _mask(row.shape[-1], lts, torch.cat([first * block, batched(begin)], -1))


def _check_anchors(anchors, there, context):
    """ValueError if an anchor is beyond the context or before the one before it, where they can be read."""
    _arguments.check_values(
        "anchors", anchors, anchors <= context, f"it must be at most the length of the context, {context}"
    )
    at = torch.where(there, anchors, context + 1)
    ordered = torch.cat([torch.ones_like(there[..., :1]), at[..., 1:] >= at[..., :-1]], -1)
    _arguments.check_values(
        "anchors",
        anchors,
        ordered,
        "sort the blocks by anchor, negative ones last: in any other order the mask may not fit two row intervals",
    )


# --- Masks of one sequence ----------------------------------------------------------------------------


def global_sliding_window(seqlen, global_tokens, window, *, device=None):
    """i < global_tokens, or j < global_tokens, or |i - j| <= window.

    BigBird without its random part (arXiv:2007.14062).
    """
    seqlen, global_tokens = _arguments.length("seqlen", seqlen), _arguments.integer("global_tokens", global_tokens, 0)
    window = min(_arguments.integer("window", window, 0), seqlen)
    key = torch.arange(seqlen, device=device)
    is_global = key < global_tokens
    lts = torch.where(is_global, seqlen, (key + window + 1).clamp(max=seqlen))
    uts = torch.zeros_like(key) + min(global_tokens, seqlen)
    ute = torch.where(is_global, uts, torch.maximum(key - window, uts))
    return _mask(seqlen, lts, torch.full_like(key, seqlen), uts, ute)


def prefix_lm_causal(seqlen, prefix, *, device=None):
    """j <= i or j < prefix (T5's prefix LM, arXiv:1910.10683).

    prefix: an int, or a tensor [...] of one for each batch entry.
    """
    seqlen, prefix = _arguments.length("seqlen", seqlen), _arguments.integers("prefix", prefix, device)
    _arguments.check_values(
        "prefix", prefix, (prefix >= 0) & (prefix <= seqlen), f"it must be between 0 and seqlen, {seqlen}"
    )
    key = torch.arange(seqlen, device=prefix.device)
    return _mask(seqlen, torch.full_like(key, seqlen), torch.where(key < prefix[..., None], 0, key))


def qk_sparse(seqlen, dropped, *, device=None):
    """j <= i, and a dropped span's key j is hidden from row j itself to the span's end (QK-sparse, arXiv:2306.01160).

    dropped: [..., spans, 2], the begin and end of each; ascending and disjoint.
    """
    seqlen = _arguments.length("seqlen", seqlen)
    dropped = _arguments.integers("dropped", dropped, device, "[..., spans, 2]")
    if dropped.shape[-1] == 0:
        dropped = dropped.reshape(*dropped.shape[:-1], 0, 2)
    if dropped.ndim < 2 or dropped.shape[-1] != 2:
        raise ValueError(
            f"dropped has shape {list(dropped.shape)}; it must be [..., spans, 2], the begin and end of each"
        )
    ends = dropped.flatten(-2)
    in_order = torch.cat([ends[..., :1] >= 0, ends[..., 1:] >= ends[..., :-1]], -1) & (ends <= seqlen)
    _arguments.check_values(
        "dropped, begins and ends in a row,",
        ends,
        in_order,
        f"spans must be ascending, disjoint and within [0, {seqlen})",
    )
    begin, end = dropped.unbind(-1)
    key = _positions(seqlen, begin)
    # The last span that begins at or before the key, counted from 1; 0 is none.
    span = torch.searchsorted(begin.contiguous(), key, right=True)
    end = torch.nn.functional.pad(end, (1, 0)).gather(-1, span)
    inside = key < end
    return _mask(seqlen, torch.where(inside, key, seqlen), torch.where(inside, end, seqlen), causal=True)


def eviction(evicted_at, *, device=None):
    """j <= i, and key j is gone from row evicted_at[j] on (eviction from a key-value cache, NACL, ACL 2024).

    evicted_at: [seqlen], [batch, seqlen] or [batch, heads, seqlen].
    """
    evicted_at = _arguments.integers("evicted_at", evicted_at, device, "[..., seqlen]")
    seqlen = evicted_at.shape[-1]
    return _mask(seqlen, evicted_at.clamp(0, seqlen), causal=True)


def random_eviction(seqlen, seed=0, *, device=None):
    """A seeded `eviction`: from row seqlen // 2 on, each row evicts one more of the keys before it that are left.

    The same seed draws the same keys on every device. They are not those of the C++ library's generator.
    """
    seqlen, seed = _arguments.length("seqlen", seqlen), _arguments.integer("seed", seed)
    kept = seqlen // 2  # keys that are there at any row from the middle on
    key = torch.arange(seqlen, device=device)
    if kept == 0:
        return eviction(torch.full_like(key, seqlen))
    # The keys that are there sit in as many slots. A row evicts the one in a random slot and puts its own key there, so
    # a key is evicted at the next row that draws the same slot.
    slot = torch.where(key < kept, key, _random_bits(key, seed) % kept)
    by_slot = slot.argsort(stable=True)
    drawn_again = torch.zeros_like(key, dtype=torch.bool)
    drawn_again[:-1] = slot[by_slot[1:]] == slot[by_slot[:-1]]
    evicted_at = torch.where(drawn_again, by_slot.roll(-1), seqlen)
    return eviction(torch.empty_like(key).scatter_(0, by_slot, evicted_at))


def hash_sparse(query_buckets, key_buckets, causal, *, device=None):
    """Row i sees key j if they fell into the same bucket and, if `causal`, j <= i + seqlen_k - seqlen_q.

    Hashing as in Reformer. query_buckets [..., seqlen_q], key_buckets [..., seqlen_k]. Fits two intervals where the
    rows of every bucket are contiguous, as after the usual sort by bucket. If it does not fit: UnrepresentableMaskError
    naming the first column that does not; on a device, or in compiled code, an asynchronous assertion.
    """
    queries = _arguments.integers("query_buckets", query_buckets, device, "[..., seqlen_q]")
    keys = _arguments.integers("key_buckets", key_buckets, device, "[..., seqlen_k]")
    causal = _arguments.flag("causal", causal)
    seqlen_q, seqlen_k = queries.shape[-1], keys.shape[-1]
    lead = torch.broadcast_shapes(queries.shape[:-1], keys.shape[:-1])
    queries, keys = queries.expand(*lead, -1).contiguous(), keys.expand(*lead, -1).contiguous()
    first = (
        (_positions(seqlen_k, keys) - (seqlen_k - seqlen_q)).clamp(0, seqlen_q) if causal else torch.zeros_like(keys)
    )
    begin, end, need = _hidden_by_bucket(queries, keys, first)
    _check_fits(need, "the hash-sparse mask", "sort the queries by bucket, so that the rows of each are contiguous")
    # At most two intervals are not empty: the first and the last of them, which may be the same one.
    there = (begin < end).int()
    picked = torch.stack([there.argmax(-1), begin.shape[-1] - 1 - there.flip(-1).argmax(-1)], -1)
    begin, end = begin.gather(-1, picked), end.gather(-1, picked)
    return _mask(seqlen_q, begin[..., 0], end[..., 0], begin[..., 1], end[..., 1], window=(-1, 0) if causal else None)


def _hidden_by_bucket(queries, keys, first):
    """The rows from `first` on that are in other buckets than the key, and how many intervals that takes.

    (begin, end) [..., seqlen_k, 4]: what is before the bucket's rows, the first two gaps between them, and what is
    after them.
    """
    rows = queries.shape[-1]
    bucket, row = queries.sort(dim=-1, stable=True)
    changes = torch.ones_like(bucket, dtype=torch.bool)
    changes[..., 1:] = bucket[..., 1:] != bucket[..., :-1]
    gap = ~changes
    gap[..., 1:] &= row[..., 1:] != row[..., :-1] + 1
    # Sorted by (rank of the bucket, row), so that a search finds a bucket's first row from `first` on. One more entry
    # ends the arrays.
    pad = lambda x, value: torch.nn.functional.pad(x, (0, 1), value=value)  # noqa: E731
    rank = pad(changes.cumsum(-1) - 1, -1)
    place = rank[..., :-1] * (rows + 1) + row
    here, until = torch.searchsorted(bucket, keys), torch.searchsorted(bucket, keys, right=True)
    start = torch.searchsorted(place.contiguous(), rank.gather(-1, here) * (rows + 1) + first)
    found = (here < until) & (start < until)
    start, stop = torch.where(found, start, rows), torch.where(found, until - 1, rows)

    gaps_until, row = pad(gap.cumsum(-1), 0), pad(row, rows)
    index = torch.arange(rows, device=row.device).expand_as(gap)
    next_gap = pad(_next_flagged(gap, index, index.new_full((1,), rows)), rows)
    gaps = gaps_until.gather(-1, stop) - gaps_until.gather(-1, start)
    gap1 = next_gap.gather(-1, start)
    gap2 = next_gap.gather(-1, gap1)
    before = lambda at: row.gather(-1, (at - 1).clamp(min=0)) + 1  # noqa: E731
    lead_end = row.gather(-1, start)
    trail = torch.where(found, row.gather(-1, stop) + 1, rows)
    none = torch.zeros_like(trail)
    begin = torch.stack(
        [none, torch.where(gaps > 0, before(gap1), 0), torch.where(gaps > 1, before(gap2), 0), trail], -1
    )
    end = torch.stack(
        [
            torch.where(lead_end > first, lead_end, 0),
            torch.where(gaps > 0, row.gather(-1, gap1), 0),
            torch.where(gaps > 1, row.gather(-1, gap2), 0),
            none + rows,
        ],
        -1,
    )
    return begin, end, (lead_end > first).long() + gaps + (trail < rows).long()


# --- Trees --------------------------------------------------------------------------------------------


def prefix_tree(parents, lengths=None, *, seqlen=None, device=None):
    """A packed prefix tree or forest: row i sees key j if j <= i and j's node is i's node or an ancestor of it.

    parents: [..., nodes] in depth-first order: parents[n] < n is the parent, -1 a root; several trees are several
    roots. lengths: [..., nodes], node n holds lengths[n] consecutive tokens; one token each if left out. A
    conversation that branches at some turn is a tree whose nodes are turns, a prompt with several answers a root
    with leaves. To fill up rows of a batch, add roots of length 0.

    seqlen: as for documents. An order that is not depth-first is a ValueError naming the node.
    """
    parents = _arguments.integers("parents", parents, device, "[..., nodes]")
    nodes = parents.shape[-1]
    lengths = (
        [1] * nodes
        if lengths is None and parents.ndim == 1
        else torch.ones_like(parents)
        if lengths is None
        else lengths
    )
    in_lists, lengths = lengths, _arguments.integers("lengths", lengths, parents.device, "[..., nodes]")
    if seqlen is None and not isinstance(in_lists, torch.Tensor):
        seqlen = _sum(_as_lists(in_lists))
    if lengths.shape[-1] != nodes:
        raise ValueError(f"lengths has {lengths.shape[-1]} entries; it needs one for each of the {nodes} nodes")
    last = _last_descendants(parents).expand(*lengths.shape[:-1], -1)
    tokens = _Documents(None, lengths.expand(*last.shape[:-1], -1), None, None, seqlen, None, name="lengths")
    ends = tokens.cu_seqlens[..., 1:]
    subtree_end = torch.cat([ends.gather(-1, last), tokens.cu_seqlens[..., -1:]], -1)
    return _mask(tokens.seqlen, subtree_end.gather(-1, tokens.index), causal=True)


def _last_descendants(parents):
    """The last node of each node's subtree, which in depth-first order is the range up to there."""
    nodes = parents.shape[-1]
    node = torch.arange(nodes, device=parents.device)
    _arguments.check_values(
        "parents", parents, (parents >= -1) & (parents < node), "a parent must be -1 (a root) or an earlier node"
    )
    # Slot 0 stands above the roots. Each round looks twice as many generations up.
    ancestor = torch.nn.functional.pad(parents.clamp(-1, nodes - 1) + 1, (1, 0))
    last = torch.nn.functional.pad(node + 1, (1, 0)).expand_as(ancestor).contiguous()
    size = torch.ones_like(ancestor)
    for _ in range(max(nodes - 1, 0).bit_length()):
        last = last.scatter_reduce(-1, ancestor, last, "amax")
        size = size.scatter_add(-1, torch.where(ancestor > 0, ancestor, 0), size * (ancestor > 0))
        ancestor = ancestor.gather(-1, ancestor)
    last, size = last[..., 1:] - 1, size[..., 1:]
    contiguous = last - node + 1 == size
    _arguments.check_values(
        "the last node of the subtree of node",
        last,
        contiguous,
        "nodes must come in depth-first order, so that each subtree is contiguous",
        always=True,
    )
    return last


def prefix_tree_from_intervals(tin, tout, *, seqlen=None, device=None):
    """The same from depth-first intervals: node n's own tokens begin at tin[n] and its subtree ends before tout[n].

    tin, tout: [..., nodes]. Intervals must nest, and a node's own tokens come before its children.
    """
    in_lists = tout
    tin, tout = (_arguments.integers(name, x, device, "[..., nodes]") for name, x in (("tin", tin), ("tout", tout)))
    if tin.shape[-1] != tout.shape[-1]:
        raise ValueError(f"tin has {tin.shape[-1]} entries and tout {tout.shape[-1]}; they must be equal")
    if seqlen is None and not isinstance(in_lists, torch.Tensor):
        seqlen = _largest(_as_lists(in_lists))
    seqlen = _length_or_total("tout", tout, seqlen)
    _check_intervals(tin, tout)
    _arguments.check_at_most("tout", tout, seqlen, "the length of the sequence")
    key = _positions(seqlen, tin)
    # The last node that begins at or before the token, counted from 1.
    node = torch.searchsorted(tin.contiguous(), key, right=True)
    return _mask(seqlen, torch.nn.functional.pad(tout, (1, 0)).gather(-1, node), causal=True)


def _check_intervals(tin, tout):
    if not _arguments.is_readable(tin) or tin.shape[-1] == 0:
        return
    before_in, before_out = (torch.nn.functional.pad(x[..., :-1], (1, 0)) for x in (tin, tout))
    child = (tin < before_out) & (tin >= before_in)
    _arguments.check_values(
        "tin", tin, child | (tin == before_out), "nodes must follow each other in depth-first order, without gaps"
    )
    # Up to the last node of the subtree, the first that begins at tout or later not being in it.
    after = torch.searchsorted(tin.contiguous(), tout.contiguous())
    own = torch.arange(tin.shape[-1])
    after = torch.maximum(after, own + 1)
    nested = (tout >= tin) & (_range_max(tout, own.expand_as(after), after) <= tout)
    _arguments.check_values("tout", tout, nested, "an interval must lie inside of its parent's")
    _arguments.check_values(
        "tout",
        tout,
        tout.gather(-1, after - 1) == tout,
        "it must be where the last child's interval ends, as a node's own tokens come before its children",
    )


def _range_max(values, begin, end):
    """The largest of values[begin:end] along the last dimension; no range is empty."""
    count = values.shape[-1]
    levels = [values]
    for step in (1 << n for n in range(count.bit_length() - 1)):
        levels.append(torch.maximum(levels[-1], levels[-1].roll(-step, -1)))  # wraps only where no range reads
    level = (end - begin).double().log2().long()
    table = torch.stack(levels)
    pick = lambda at: table.gather(-1, at.expand(len(levels), *at.shape)).gather(0, level[None])[0]  # noqa: E731
    return torch.maximum(pick(begin), pick(end - (1 << level)))


# --- Batches ------------------------------------------------------------------------------------------


def padding(seqlen_q, seqlen_k, key_lengths, query_lengths=None, *, device=None):
    """One mask per batch entry, of its own lengths.

    Keys at key_lengths[b] and beyond are hidden, and rows at query_lengths[b] and beyond see nothing.
    """
    seqlen_q, seqlen_k = _arguments.length("seqlen_q", seqlen_q), _arguments.length("seqlen_k", seqlen_k)
    key_lengths = _arguments.integers("key_lengths", key_lengths, device)
    if query_lengths is None:
        queries = torch.full_like(key_lengths, seqlen_q)
    else:
        queries = _arguments.integers("query_lengths", query_lengths, key_lengths.device)
    if key_lengths.ndim != 1 or key_lengths.shape[0] == 0:
        raise ValueError(
            f"key_lengths has shape {list(key_lengths.shape)}; it must be [batch], one entry for each batch entry"
        )
    if queries.shape != key_lengths.shape:
        raise ValueError(
            f"query_lengths has {queries.shape[0] if queries.ndim else 'no'} entries "
            f"and key_lengths {key_lengths.shape[0]}; they must be equal"
        )
    _arguments.check_values(
        "key_lengths",
        key_lengths,
        (key_lengths >= 0) & (key_lengths <= seqlen_k),
        f"it must be between 0 and seqlen_k, {seqlen_k}",
    )
    _arguments.check_values(
        "query_lengths",
        queries,
        (queries >= 0) & (queries <= seqlen_q),
        f"it must be between 0 and seqlen_q, {seqlen_q}",
    )
    key = torch.arange(seqlen_k, device=key_lengths.device)
    lts = torch.where(key < key_lengths[:, None], queries[:, None], 0)
    return _mask(seqlen_q, lts, torch.zeros_like(lts))


# --- From other forms ---------------------------------------------------------------------------------


def from_startend(startend_row_indices, causal=False, seqlen_q=None, q_offset=None):
    """The mask of FlashMask's startend_row_indices under its `causal` flag.

    startend_row_indices: int32 or int64 [batch, heads, seqlen_k, n], see Mask.bounds. seqlen_q: default seqlen_k.
    q_offset: default seqlen_k - seqlen_q.
    """
    if not isinstance(startend_row_indices, torch.Tensor) or startend_row_indices.ndim != 4:
        got = (
            list(startend_row_indices.shape)
            if isinstance(startend_row_indices, torch.Tensor)
            else type(startend_row_indices).__name__
        )
        raise ValueError(f"startend_row_indices is {got}; it must be a tensor [batch, heads, seqlen_k, n]")
    seqlen_k = startend_row_indices.shape[2]
    return Mask(
        seqlen_k if seqlen_q is None else seqlen_q,
        seqlen_k,
        bounds=startend_row_indices,
        causal=causal,
        q_offset=q_offset,
    )


def from_dense(visible):
    """The mask of a dense matrix, exactly: row i sees key j where it is nonzero.

    bool or uint8 [seqlen_q, seqlen_k] or [batch, heads, seqlen_q, seqlen_k]. Reads the matrix, so on a GPU it waits for
    it, and torch.compile cannot trace it. Bands are tried in the order none, causal, left edge, both, each the tightest
    that holds; the fewest intervals win. Raises UnrepresentableMaskError naming the first (batch, head, column) that
    needs more than two intervals and how many.
    """
    if (
        not isinstance(visible, torch.Tensor)
        or visible.dtype not in (torch.bool, torch.uint8)
        or visible.ndim not in (2, 4)
    ):
        got = f"{visible.dtype} {list(visible.shape)}" if isinstance(visible, torch.Tensor) else type(visible).__name__
        raise ValueError(
            f"visible is {got}; it must be bool or uint8, [seqlen_q, seqlen_k] or [batch, heads, seqlen_q, seqlen_k]"
        )
    if visible.ndim == 2:
        visible = visible[None, None]
    if visible.shape[0] < 1 or visible.shape[1] < 1:
        raise ValueError(f"visible is {list(visible.shape)}; batch and heads must be at least 1")
    return Mask(**_columns.from_dense(visible.bool()))


# --- Helpers ------------------------------------------------------------------------------------------


class _Documents:
    """Documents packed one after the other: what each token has to know of its own.

    position, begin, end, index: int64 [..., seqlen]: the token, where its document begins and ends, which one it is.
    last_begin [..., 1]: where the last document begins. cu_seqlens and count only where they are known without looking
    at the tokens. Past the last document begin and end are equal, so that the token is hidden from every row.
    name: what errors call the lengths, if not seqlens.
    """

    def __init__(self, cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device, name=None):
        given = {"cu_seqlens": cu_seqlens, "seqlens": seqlens, "doc_ids": doc_ids, "position_ids": position_ids}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) + ' are' if given else 'nothing is'} given; "
                "it must be one of cu_seqlens, seqlens, doc_ids and position_ids"
            )
        ((kind, values),) = given.items()
        if seqlen is not None:
            seqlen = _arguments.length("seqlen", seqlen)
        values = _as_lists(values)
        name = name or kind
        tensor = _arguments.integers(name, values, device, "[..., n]")
        in_lists = seqlen is None and not isinstance(values, torch.Tensor)
        if kind in ("doc_ids", "position_ids"):
            self._from_tokens(name, tensor, seqlen)
        elif kind == "seqlens":
            _arguments.check_values(name, tensor, tensor >= 0, "a length must be at least 0")
            ends = torch.nn.functional.pad(tensor.cumsum(-1), (1, 0))
            self._from_ends(name, ends, _sum(values) if in_lists else seqlen)
            if seqlen is not None:
                _arguments.check_at_most(f"the sum of {name}", ends[..., -1], seqlen, "the length of the sequence")
        else:
            if tensor.shape[-1] == 0:
                raise ValueError("cu_seqlens is empty; it must begin with 0, then give the end of each document")
            _arguments.check_cu_seqlens(
                name, tensor, seqlen, "the length of the sequence", "; lengths go in as seqlens="
            )
            self._from_ends(name, tensor, _largest(values) if in_lists else seqlen)

    def _from_ends(self, name, cu_seqlens, seqlen):
        self.cu_seqlens, self.count = cu_seqlens, cu_seqlens.shape[-1] - 1
        self.seqlen = _length_or_total(name, cu_seqlens, seqlen)
        self.position = _positions(self.seqlen, cu_seqlens)
        # Documents that end at or before the token.
        self.index = torch.searchsorted(cu_seqlens[..., 1:].contiguous(), self.position, right=True)
        self.begin = cu_seqlens.gather(-1, self.index)
        self.end = torch.cat([cu_seqlens[..., 1:], cu_seqlens[..., -1:]], -1).gather(-1, self.index)
        self.last_begin = cu_seqlens[..., max(self.count - 1, 0)][..., None]

    def _from_tokens(self, name, tokens, seqlen):
        self.cu_seqlens = self.count = None
        self.seqlen = tokens.shape[-1]
        if seqlen is not None and seqlen != self.seqlen:
            raise ValueError(
                f"seqlen is {seqlen}, but {name} has {self.seqlen} tokens; leave seqlen out, or make them equal"
            )
        step = 1 if name == "position_ids" else 0
        begins = torch.ones_like(tokens, dtype=torch.bool)
        begins[..., 1:] = tokens[..., 1:] != tokens[..., :-1] + step
        if name == "doc_ids":
            _check_ids(tokens, begins)
        self.position = _positions(self.seqlen, tokens)
        self.index = begins.cumsum(-1) - 1
        self.begin = torch.where(begins, self.position, 0).cummax(-1).values
        self.end = _next_flagged(begins, self.position, self.position.new_full((1,), self.seqlen))
        self.last_begin = self.begin[..., -1:] if self.seqlen else self.begin.new_zeros((*tokens.shape[:-1], 1))


def _documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device):
    """The documents given, or one of all `seqlen` tokens."""
    if seqlen is not None and all(given is None for given in (cu_seqlens, seqlens, doc_ids, position_ids)):
        seqlen = _arguments.length("seqlen", seqlen)
        # A list's copy to the device would be waited for.
        seqlens = torch.full((1,), seqlen, dtype=torch.int64, device=device)
    return _Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)


def _check_ids(ids, begins):
    """ValueError if a document's id comes back after another one, where the ids can be read."""
    if not _arguments.is_readable(ids):
        return
    at = begins.nonzero()
    named = torch.cat([at[:, :-1], ids[begins][:, None]], -1)  # batch entry and id of each document
    again = _first_repeat(named)
    if again is not None:
        raise ValueError(
            f"document id {int(named[again, -1])} comes back at {at[again].tolist()}; "
            "the tokens of a document must be contiguous"
        )


def _check_blocks(ids, begins, document):
    """ValueError if a block's id comes back in its document after other tokens, where the ids can be read."""
    if not _arguments.is_readable(ids):
        return
    at = begins.nonzero()
    again = _first_repeat(torch.cat([at[:, :-1], document[begins][:, None], ids[begins][:, None]], -1))
    if again is not None:
        raise ValueError(
            f"block id {int(ids[tuple(at[again])])} comes back at {at[again].tolist()}; "
            "the tokens of a block must be contiguous, as a block in parts may need more than two "
            "row intervals per key column (from_dense takes it if it does not)"
        )


def _first_repeat(rows):
    """The first row of a matrix that was there before, or None."""
    _, which, count = rows.unique(dim=0, return_inverse=True, return_counts=True)
    if not bool((count > 1).any()):
        return None
    seen = torch.zeros_like(count).scatter_reduce(0, which, torch.arange(len(which)), "amin", include_self=False)
    return int((torch.arange(len(which)) > seen[which]).int().argmax())


def _mask(seqlen_q, *vectors, causal=False, window=None):
    """A Mask of the vectors [seqlen_k], [batch, seqlen_k] or [batch, heads, seqlen_k]."""
    bounds = torch.stack(torch.broadcast_tensors(*vectors), -1).int()
    if bounds.ndim > 4:
        raise ValueError(f"the argument has {bounds.ndim - 2} leading dimensions; at most batch and heads are accepted")
    if bounds.ndim < 4:
        bounds = bounds.reshape(*((1,) if bounds.ndim == 2 else bounds.shape[:1]), 1, *bounds.shape[-2:])
    return Mask(seqlen_q, bounds.shape[2], bounds=bounds, causal=causal, window=window)


def _positions(seqlen, like):
    """0, 1, ..., seqlen - 1 along the last dimension, the leading ones and the device as of `like`.

    Contiguous, as searchsorted wants it.
    """
    return torch.arange(seqlen, device=like.device).expand(*like.shape[:-1], -1).contiguous()


def _next_flagged(flags, values, otherwise):
    """Of each entry the value at the next flagged one after it, or `otherwise` [..., 1]; values ascend."""
    values = torch.where(flags, values, otherwise)
    later = torch.cat([values[..., 1:], otherwise.expand(*values.shape[:-1], 1)], -1)[..., : values.shape[-1]]
    return later.flip(-1).cummin(-1).values.flip(-1)


def _as_lists(values):
    """numpy's arrays as lists, which can be added up on the host."""
    return values.tolist() if hasattr(values, "tolist") and not isinstance(values, torch.Tensor) else values


def _sum(lengths):
    """The largest total of lists of lengths, nested or not."""
    if lengths and isinstance(lengths[0], (list, tuple)):
        return max([_sum(row) for row in lengths])
    return sum(lengths)


def _largest(ends):
    """The largest number in lists, nested or not."""
    if ends and isinstance(ends[0], (list, tuple)):
        return max([_largest(row) for row in ends])
    return max(ends) if ends else 0


def _length_or_total(name, ends, seqlen):
    """seqlen, or the last of `ends` where it can be read without waiting."""
    if seqlen is not None:
        return _arguments.length("seqlen", seqlen)
    if not _arguments.is_readable(ends):
        raise ValueError(
            f"seqlen is missing; {name} is not read on the host "
            f"(it is on {ends.device}, or the code is being compiled), "
            "so the length of the sequence must be given"
        )
    return int(ends.max()) if ends.numel() else 0


def _check_fits(need, what, advice):
    """UnrepresentableMaskError if a column needs more than two intervals; an assertion on a device that is not read."""
    if not _arguments.is_readable(need):
        torch._assert_async((need <= 2).all(), f"{what} does not fit two row intervals per key column; {advice}")
    elif bool((need > 2).any()):
        at = (need > 2).nonzero()[0].tolist()
        raise UnrepresentableMaskError(
            f"{what} does not fit two row intervals per key column: "
            f"column {at[-1]} needs {int(need[tuple(at)])}; {advice}",
            at[-1],
        )


def _reach(window, seqlen):
    """How far a window of the last `window` keys reaches, -1 being all of them."""
    window = _arguments.integer("window", window)
    if window < 1 and window != -1:
        raise ValueError(f"window is {window}; it must be at least 1, or -1 for all")
    return seqlen if window == -1 else min(window, seqlen)


def _random_bits(counter, seed):
    """63 random bits for each counter: splitmix64 in wrapping int64 arithmetic, the same on every device."""

    def signed(constant):
        return constant - (1 << 64) if constant >= 1 << 63 else constant

    def shifted(x, by):
        return (x >> by) & ((1 << (64 - by)) - 1)

    x = counter * signed(0x9E3779B97F4A7C15) + signed((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % (1 << 64))
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    return shifted(x ^ shifted(x, 31), 1)
