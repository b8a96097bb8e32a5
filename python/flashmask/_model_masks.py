# SPDX-License-Identifier: Apache-2.0
"""Masks of particular models and training methods, exported by flashmask.masks, which documents the arguments."""

import torch

from . import _arguments, _building


def attention_sink_window(
    sink, window, cu_seqlens=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None
):
    """The last `window` keys, the row's own included, and the document's first `sink` keys (arXiv:2309.17453).

    StreamingLLM: same document, j <= i, and i - j < window or j among the first `sink` tokens of the document.
    window: an int of at least 1, or -1 for all keys before. seqlen alone is one document of all.
    """
    sink = _arguments.integer("sink", sink, 0)
    documents = _building.documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    key, end = documents.position, documents.end
    until = torch.minimum(key + _building.reach(window, documents.seqlen), end)
    return _building.mask_of(documents.seqlen, torch.where(key - documents.begin < sink, end, until), causal=True)


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
    return _building.mask_of(documents.seqlen, until, begin)


def _documents_of_blocks(blocks, cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device):
    """The documents given, or one of all blocks."""
    if isinstance(blocks, torch.Tensor) and device is None:
        device = blocks.device
    if not _is_one_length(blocks) and all(given is None for given in (cu_seqlens, seqlens, doc_ids, position_ids)):
        seqlen = _building.Documents(None, blocks, None, None, seqlen, device, name="blocks").seqlen
    return _building.documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)


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
    return begin, begin + _building.reach(window, documents.seqlen) * length


def _blocks(lengths, documents, window):
    """The same of blocks of these lengths."""
    blocks = _building.Documents(None, lengths, None, None, documents.seqlen, documents.begin.device, name="blocks")
    later = (blocks.index + _building.reach(window, blocks.count)).clamp(max=blocks.count)
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
    documents = _building.documents_or_one(
        cu_seqlens, seqlens, doc_ids, position_ids, block_ids.shape[-1], block_ids.device
    )
    key = documents.position.expand(torch.broadcast_shapes(block_ids.shape, documents.position.shape))
    block_ids = block_ids.expand(key.shape)
    begins = key == documents.begin
    begins[..., 1:] |= block_ids[..., 1:] != block_ids[..., :-1]
    inside = block_ids >= 0
    _building.check_blocks(block_ids, begins & inside, documents.index.expand(key.shape))
    begin = torch.where(begins, key, 0).cummax(-1).values
    end = _building.next_flagged(begins, key, key.new_full((1,), documents.seqlen))
    until = torch.maximum(torch.where(inside, end, key + 1), key + _building.reach(window, documents.seqlen))
    return _building.mask_of(documents.seqlen, torch.minimum(until, documents.end), torch.where(inside, begin, key))


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
    return _building.mask_of(2 * total, *vectors), order


def _concatenated_diffusion(documents, begin, end, until, token):
    """The same of [x_t | x_0] as it is."""
    total, visible = documents.seqlen, end > token
    last = end == until  # no later block sees it: the rows before its own clean copy are one run
    need = torch.where(visible & ~last & (until < total), 3, 2)
    _building.check_fits(
        torch.cat([torch.full_like(need, 2), need], -1),
        "the block-diffusion mask in the order 'concatenated'",
        "the order 'interleaved' fits every packing",
    )
    none, rows = torch.zeros_like(begin), torch.full_like(begin, 2 * total)
    first = torch.cat([begin, torch.where(last, total + begin, end)], -1)
    lts = torch.cat([end, torch.where(last, total + until, until)], -1)
    lte = torch.cat([rows, torch.where(last, rows, total + begin)], -1)
    hidden = ~torch.cat([visible, visible], -1)
    mask = _building.mask_of(
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
    documents = _building.documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    token, end = documents.position, documents.end
    own = torch.where(end > token, token + 1, 0)
    return _building.mask_of(
        documents.seqlen, torch.cat([end] + [own] * (steps - 1), -1), torch.cat([token] * steps, -1)
    )


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
    documents = _building.documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, anchors.device)
    context, there = documents.seqlen, anchors >= 0
    _check_anchors(anchors, there, context)
    lead = torch.broadcast_shapes(anchors.shape[:-1], documents.end.shape[:-1])
    batched = lambda values: values.expand(*lead, -1).contiguous()  # noqa: E731
    at = batched(torch.where(there, anchors, context + 1))  # no key and no document is after that
    first = torch.searchsorted(at, batched(documents.position), right=True)
    last = torch.searchsorted(torch.where(at == context, context - 1, at), batched(documents.end))
    row = _building.positions(anchors.shape[-1] * block, anchors)
    begin, own = row - row % block, there.repeat_interleave(block, -1)
    lts = torch.cat([last * block, batched(torch.where(own, begin + block, 0))], -1)
    return _building.mask_of(row.shape[-1], lts, torch.cat([first * block, batched(begin)], -1))


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
