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
