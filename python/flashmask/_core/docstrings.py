# SPDX-License-Identifier: Apache-2.0
"""Paragraphs that docstrings of several frontends share."""

import re
import textwrap
from typing import TypeVar

from .call_options import OPTIONS

Documented = TypeVar("Documented")

PARAGRAPHS = {
    **{option.name: option.doc for option in OPTIONS if option.doc},
    "mask": """\
An attention mask in O(seqlen_k) memory: which query row sees which key. Immutable.

Row i sees key j if none of these hides it:

- `bounds`: FlashMask's startend_row_indices, int32 or integers to convert to it, [batch or 1, heads or 1, seqlen_k,
  n], absolute query rows. With `causal` n is 1 (LTS) or 2 (LTS, LTE), without it 2 (LTS, UTE) or 4 (LTS, LTE, UTS,
  UTE): column j is hidden from the rows LTS[j] <= i < LTE[j] and UTS[j] <= i < UTE[j]. A missing LTE is seqlen_q, a
  missing UTS 0. Values are clamped to [0, seqlen_q].
- `causal`: j <= i + q_offset.
- `window`: (left, right): i + q_offset - left <= j <= i + q_offset + right; -1 leaves a side open, as does None or
  a side beyond all sequences (sys.maxsize); an int is both sides.
- `q_offset`: the key position of row 0; None is seqlen_k - seqlen_q, which aligns the last row with the last key.
- `block_mask`: bool, uint8 or int32 [batch or 1, heads or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128)], nonzero
  keeps the block.

Bounds and block mask may each have 1, heads_kv or heads_q heads of the call.""",
    "startend_row_indices": """\
int32 [batch or 1, 1 or heads_kv or heads_q, seqlen_k, n], absolute query rows: with causal n = 1 (rows from LTS on
are hidden) or 2 (rows LTS to LTE), without n = 2 (from LTS on; before UTE) or 4 (LTS to LTE; UTS to UTE). None: no
key has hidden rows of its own.""",
    "block_mask": """\
block_mask: bool, uint8 or int32 [batch or 1, 1 or heads_kv or heads_q, ceil(seqlen_q / 128), ceil(seqlen_k / 128)],
    0 hides the block.""",
    "positions": """\
q_pos, k_pos: int32 [batch or 1, seqlen_q] and [batch or 1, seqlen_k], both or neither: positions that causal and the
    window compare in place of i + q_offset and j. Row i sees key j if k_pos[j] <= q_pos[i], and if q_pos[i] - left <=
    k_pos[j] <= q_pos[i] + right; a side of 2^31 - 1 or more is open. Any numbers in any order. Row intervals and the
    block mask still count rows and keys; positions have no effect without causal or a window.""",
    "interval_lists": """\
column_ptr, intervals: int32 [batch or 1, heads or 1, seqlen_k + 1] and [n, 2], both or neither, in place of bounds: any
    number of hidden row intervals per column. Column j is hidden from the rows begin <= i < end of intervals
    column_ptr[j] up to, but not including, column_ptr[j + 1], which count over all batch entries and heads. Intervals
    may be empty, overlap and come in any order. KV caches take none (UnsupportedError). On a GPU a column_ptr that does
    not ascend is no error: its column has the intervals that are there.""",
    "from_dense": """\
The mask of a dense matrix, exactly: row i sees key j where it is nonzero.

visible: bool or uint8, [seqlen_q, seqlen_k] or [batch, heads, seqlen_q, seqlen_k]. Bands are tried in the order none,
causal, left edge, both, each the tightest that holds; the fewest intervals win. A matrix that needs more than two in
some column becomes a mask with interval lists.""",
    "dropout_mask": """\
The attention weights that a call with this dropout keeps: bool [batch, heads, seqlen_q, seqlen_k], True = kept.

state: the dropout_state of the call, a seed and an offset. p: its dropout. heads: those of the queries. The result
depends on nothing else: not on the backend, tiles, threads, mask or lengths. Kept weights are scaled by 65536 / (65536
- t), where t is p * 65536, rounded.

Raises TypeError or ValueError if an argument is wrong.""",
    "layout": """\
layout: "bshd" as above, or "bhsd": the arrays and the result are [batch, heads, seqlen, head_dim].""",
    "hidden_rows": "A row that sees no key gets 0, and lse -inf (with a sink, the sink).",
    "raises": """\
Raises TypeError or ValueError if an argument is wrong, and UnsupportedError if no backend takes the call.""",
    "page_table": """\
page_table: int32 [batch, max_pages], the page of a sequence's n-th page_size keys; or (indptr, indices), int32
    [batch + 1] and [entries]: request b has the pages indices[indptr[b] : indptr[b + 1]].
seqlens: int32 [batch], the keys of each request, those of the call's own rows among them. None: as many as it has
    room for. Clamped to that room.""",
    "sequence_mask": """\
causal: keys after a row's position are hidden.
window_size: (left, right), keys around a row's position that it sees; -1: open. An int is both sides.
bounds: startend_row_indices. Column j is hidden from the sequence's rows LTS[j] <= i < LTE[j] and UTS[j] <= i <
    UTE[j]: n = 1 (LTS) or 2 (LTS, LTE) vectors with causal, 2 (LTS, UTE) or 4 (LTS, LTE, UTS, UTE) without; 2^31 -
    1 as an end is for good. [1 or batch, 1 or heads_kv, columns, n], where keys past the columns see the band
    alone, or beside the pages [pages, page_size, 1 or heads_kv, n].
tail: [batch, T, ceil(T / 32)] of T <= 128: among a sequence's last rows and keys row t sees key u if bit u % 32 of
    word u / 32 is set, in place of the band's upper edge, as a tree of drafts has it.
tail_lens: [batch], how many rows and keys are the tail; None: as many as T, the call's rows and the keys allow.
tail_depth: [batch, T], which makes the tail's positions n - its length + depth, of n keys.
q_pos: positions of the call's rows, of q's first dimensions. None: the index of the row's own key.
k_pos: positions of keys, [1 or batch, columns], or beside the pages [pages, page_size]. Needs q_pos. None: the
    index of the key.
block_mask: bool or uint8 [1 or batch, 1 or heads_kv, row blocks, key blocks]: the sequence's row i sees key j only
    where element [i // 128, j // 128] is not 0. One row block stands for all rows; blocks past the last hide
    nothing. Keys of a hidden block are not read.
key_layout: how bounds and k_pos lie: by "sequences" or beside the "pages"; "auto": a call decides by their shapes.""",
    "cached_rows": """\
cache: a KvCache that holds the keys and values of the rows, too (append_kv).
mask: a SequenceMask; None: causal.
cu_seqlens_q: int32 [batch + 1]; request b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].""",
    "cached_alibi_slopes": """\
alibi_slopes: float32 [heads_q] or [batch, heads_q]: scores, scaled and capped, are lowered by the slope times the
    distance of positions.""",
    "cached_split_size": """\
split_size: keys of a sequence from one partial sum to the next, a multiple of 128.
return_softmax_lse: returns lse, too.""",
    "write_scales": """\
write_scales: writes cache.k_scale and v_scale, too, which have to be float32 [pages, page_size or 1, 1 or heads_kv],
    over all heads where these share a scale. Of a token: its largest magnitude over 448; 1 for zeros. Of a page: the
    least power of two, from 2^-126 on, that takes all of its finite numbers. A call that writes the page's first slot
    begins its scale anew; any other only doubles it as often as its tokens need, and halves what the page holds as
    often. In one call one request at most may append to a page.""",
    "cached_results": """\
Returns out, q's dtype and dimensions but the last, which is head_dim_v, and lse [batch, heads_q, m], or [heads_q,
rows] where q is packed; natural logarithm, float32 (float64 for float64).""",
    "explain": """\
Explains, as text, what the call would do with these arguments; attention itself is not run.

Describes the parts of the mask, the numbers of full, partial and skipped tiles of 128 x 128, and the backend and
configuration that take the call, forward and backward; if none does, why, and the smallest change that would help. A
call that would raise is not an error here: the text says why. On a GPU it waits for the mask's statistics, so it does
not belong in a training loop.""",
}


def composed(documented: Documented) -> Documented:
    """A decorator: a line of the docstring that is a name in braces, `{raises}`, becomes the paragraph of that name."""
    if documented.__doc__:  # none under python -OO
        documented.__doc__ = re.sub(r"^( *)\{(\w+)\}$", _paragraph, documented.__doc__, flags=re.MULTILINE)
    return documented


def _paragraph(line: re.Match[str]) -> str:
    return textwrap.indent(PARAGRAPHS[line[2]], line[1])
