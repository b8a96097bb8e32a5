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

from . import _arguments, _building, _columns
from ._model_masks import attention_sink_window, block_causal, block_diffusion, causal_with_blocks, dflash, eagle3_ttt
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
    documents = _building.Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    return _building.mask_of(documents.seqlen, documents.end, causal=True)


def document(cu_seqlens=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None):
    """Same document, in both directions."""
    documents = _building.Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    return _building.mask_of(documents.seqlen, documents.end, documents.begin)


def prefix_lm_document(
    cu_seqlens=None, prefix=None, *, seqlens=None, doc_ids=None, position_ids=None, seqlen=None, device=None
):
    """Same document, and j <= i or j among its first prefix[document] tokens. prefix: [..., documents]."""
    documents = _building.Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
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
    return _building.mask_of(
        documents.seqlen, documents.end, torch.where(key - documents.begin < own, documents.begin, key)
    )


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
    blocks = _building.Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)
    # Keys of the last block: the interval that begins at seqlen is empty.
    seen_to_end = blocks.position >= blocks.last_begin
    return _building.mask_of(
        blocks.seqlen, torch.where(seen_to_end, blocks.seqlen, blocks.end), blocks.last_begin, causal=True
    )


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
    segments = _building.Documents(None, seqlens, None, None, seqlen, device)
    is_question = _arguments.flags("is_question", is_question, segments.begin.device)
    if is_question.shape[-1] != segments.count:
        raise ValueError(
            f"is_question has {is_question.shape[-1]} entries; it needs one for each of the {segments.count} segments"
        )
    total = segments.cu_seqlens[..., -1:]
    # A question is seen to the end of its group, where the next one begins; an answer to its own end.
    group_end = _building.next_flagged(is_question, segments.cu_seqlens[..., :-1], total)
    seen_until = torch.where(is_question, group_end, segments.cu_seqlens[..., 1:])
    return _building.mask_of(
        segments.seqlen, torch.cat([seen_until, total], -1).gather(-1, segments.index), causal=True
    )


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
    return _building.mask_of(seqlen, lts, torch.full_like(key, seqlen), uts, ute)


def prefix_lm_causal(seqlen, prefix, *, device=None):
    """j <= i or j < prefix (T5's prefix LM, arXiv:1910.10683).

    prefix: an int, or a tensor [...] of one for each batch entry.
    """
    seqlen, prefix = _arguments.length("seqlen", seqlen), _arguments.integers("prefix", prefix, device)
    _arguments.check_values(
        "prefix", prefix, (prefix >= 0) & (prefix <= seqlen), f"it must be between 0 and seqlen, {seqlen}"
    )
    key = torch.arange(seqlen, device=prefix.device)
    return _building.mask_of(seqlen, torch.full_like(key, seqlen), torch.where(key < prefix[..., None], 0, key))


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
    key = _building.positions(seqlen, begin)
    # The last span that begins at or before the key, counted from 1; 0 is none.
    span = torch.searchsorted(begin.contiguous(), key, right=True)
    end = torch.nn.functional.pad(end, (1, 0)).gather(-1, span)
    inside = key < end
    return _building.mask_of(seqlen, torch.where(inside, key, seqlen), torch.where(inside, end, seqlen), causal=True)


def eviction(evicted_at, *, device=None):
    """j <= i, and key j is gone from row evicted_at[j] on (eviction from a key-value cache, NACL, ACL 2024).

    evicted_at: [seqlen], [batch, seqlen] or [batch, heads, seqlen].
    """
    evicted_at = _arguments.integers("evicted_at", evicted_at, device, "[..., seqlen]")
    seqlen = evicted_at.shape[-1]
    return _building.mask_of(seqlen, evicted_at.clamp(0, seqlen), causal=True)


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
    slot = torch.where(key < kept, key, _building.random_bits(key, seed) % kept)
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
        (_building.positions(seqlen_k, keys) - (seqlen_k - seqlen_q)).clamp(0, seqlen_q)
        if causal
        else torch.zeros_like(keys)
    )
    begin, end, need = _hidden_by_bucket(queries, keys, first)
    _building.check_fits(
        need, "the hash-sparse mask", "sort the queries by bucket, so that the rows of each are contiguous"
    )
    # At most two intervals are not empty: the first and the last of them, which may be the same one.
    there = (begin < end).int()
    picked = torch.stack([there.argmax(-1), begin.shape[-1] - 1 - there.flip(-1).argmax(-1)], -1)
    begin, end = begin.gather(-1, picked), end.gather(-1, picked)
    return _building.mask_of(
        seqlen_q, begin[..., 0], end[..., 0], begin[..., 1], end[..., 1], window=(-1, 0) if causal else None
    )


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
    next_gap = pad(_building.next_flagged(gap, index, index.new_full((1,), rows)), rows)
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
        seqlen = _building.sum_of(_building.as_lists(in_lists))
    if lengths.shape[-1] != nodes:
        raise ValueError(f"lengths has {lengths.shape[-1]} entries; it needs one for each of the {nodes} nodes")
    last = _last_descendants(parents).expand(*lengths.shape[:-1], -1)
    tokens = _building.Documents(None, lengths.expand(*last.shape[:-1], -1), None, None, seqlen, None, name="lengths")
    ends = tokens.cu_seqlens[..., 1:]
    subtree_end = torch.cat([ends.gather(-1, last), tokens.cu_seqlens[..., -1:]], -1)
    return _building.mask_of(tokens.seqlen, subtree_end.gather(-1, tokens.index), causal=True)


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
        seqlen = _building.largest_of(_building.as_lists(in_lists))
    seqlen = _building.length_or_total("tout", tout, seqlen)
    _check_intervals(tin, tout)
    _arguments.check_at_most("tout", tout, seqlen, "the length of the sequence")
    key = _building.positions(seqlen, tin)
    # The last node that begins at or before the token, counted from 1.
    node = torch.searchsorted(tin.contiguous(), key, right=True)
    return _building.mask_of(seqlen, torch.nn.functional.pad(tout, (1, 0)).gather(-1, node), causal=True)


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
    return _building.mask_of(seqlen_q, lts, torch.zeros_like(lts))


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
    return Mask(**_columns.from_dense(visible))
