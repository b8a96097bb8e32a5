# SPDX-License-Identifier: Apache-2.0
"""Layout of the bits of granules (64 rows x 128 keys) in a plan's buffer: include/flashmask/plan.h's PlanLayout.

A test compares it with plans that the library builds. Sections of a plan after these four do not matter here.
"""

import struct
from dataclasses import dataclass

HEADER = struct.Struct("<QqqqqQ")  # magic, seqlen_q, seqlen_k, batch, heads, mask hash
ROWS, KEYS = 64, 128


def ceil_div(a, b):
    return -(-a // b)


@dataclass(frozen=True)
class PlanLayout:
    """Byte offsets of the uint64 sections, and the words of each."""

    masks: int
    row_granules: int
    key_blocks: int
    words_per_row: int
    words_per_key: int
    row_live_bits: int
    row_full_bits: int
    key_live_bits: int
    key_full_bits: int
    end: int


def plan_layout(seqlen_q, seqlen_k, batch=1, heads=1):
    masks, rows, keys = batch * heads, ceil_div(seqlen_q, ROWS), ceil_div(seqlen_k, KEYS)
    per_row, per_key = ceil_div(keys, 64), ceil_div(rows, 64)
    by_rows, by_keys = 8 * masks * rows * per_row, 8 * masks * keys * per_key
    begin = HEADER.size
    return PlanLayout(
        masks,
        rows,
        keys,
        per_row,
        per_key,
        begin,
        begin + by_rows,
        begin + 2 * by_rows,
        begin + 2 * by_rows + by_keys,
        begin + 2 * (by_rows + by_keys),
    )


def full_sections(layout):
    """(begin, end) in bytes of the two sections of full bits: of the rows, of the keys."""
    return (layout.row_full_bits, layout.key_live_bits), (layout.key_full_bits, layout.end)


def live_sections(layout):
    return (layout.row_live_bits, layout.row_full_bits), (layout.key_live_bits, layout.key_full_bits)
