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
Which query row sees which key, in O(seqlen_k) memory. Immutable.

Row i sees key j if nothing of this hides it:

- `bounds`: FlashMask's startend_row_indices, int32 or integers to convert to it, [batch or 1, heads or 1, seqlen_k,
  n], absolute query rows. With `causal` n is 1 (LTS) or 2 (LTS, LTE), without it 2 (LTS, UTE) or 4 (LTS, LTE, UTS,
  UTE): column j is hidden from the rows LTS[j] <= i < LTE[j] and UTS[j] <= i < UTE[j]. A missing LTE is seqlen_q, a
  missing UTS 0. Values are clamped to [0, seqlen_q].
- `causal`: j <= i + q_offset.
- `window`: (left, right): i + q_offset - left <= j <= i + q_offset + right; -1 leaves a side open, as does None or
  a side beyond all sequences (sys.maxsize); an int is both sides.
- `q_offset`: the key position of row 0; None is seqlen_k - seqlen_q, which puts the last row at the last key.
- `block_mask`: bool, uint8 or int32 [batch or 1, heads or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128)], nonzero
  keeps the block.

Heads are those of the call: 1, heads_kv or heads_q, each of the two on its own.""",
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
    block mask go on counting rows and keys; without causal and a window they have no effect.""",
    "dropout_mask": """\
Which attention weights a call with this dropout keeps: bool [batch, heads, seqlen_q, seqlen_k], True = kept.

state: the dropout_state of the call, a seed and an offset. p: its dropout. heads: those of the queries. It depends on
nothing else: not on the backend, tiles, threads, mask or lengths. What is kept is scaled by 65536 / (65536 - t), where
t is p * 65536, rounded.

Raises TypeError or ValueError if an argument is wrong.""",
    "layout": """\
layout: "bshd" as above, or "bhsd": the arrays and the result are [batch, heads, seqlen, head_dim].""",
    "hidden_rows": "A row that sees no key gets 0, and lse -inf (with a sink, the sink).",
    "raises": """\
Raises TypeError or ValueError if an argument is wrong, and UnsupportedError if no backend takes the call.""",
    "explain": """\
What the call would do with these arguments, as text; attention itself is not run.

Says what the mask is made of, how many tiles of 128 x 128 are full, partial and skipped, which backend and
configuration takes the call, forward and backward, and, where none does, why, and the least that would have to
change. A call that would raise is not an error here: the text says why. On a GPU it waits for the mask's statistics,
so it is a tool to look with, not a part of a training loop.""",
}


def composed(documented: Documented) -> Documented:
    """A decorator: a line of the docstring that is a name in braces, `{raises}`, becomes the paragraph of that name."""
    if documented.__doc__:  # none under python -OO
        documented.__doc__ = re.sub(r"^( *)\{(\w+)\}$", _paragraph, documented.__doc__, flags=re.MULTILINE)
    return documented


def _paragraph(line: re.Match[str]) -> str:
    return textwrap.indent(PARAGRAPHS[line[2]], line[1])
