# SPDX-License-Identifier: Apache-2.0
"""Markdown and figures as text."""

import math
import textwrap

from benchmarks.receipts import short_length


def markdown_table(head, rows):
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def paragraph(text):
    return [*textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False), ""]


def item(text):
    """A point of a list."""
    marks = {"initial_indent": "- ", "subsequent_indent": "  "}
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False, **marks)


def ms_text(ms):
    """Three digits, or all before the point."""
    return f"{ms:.{max(0, 2 - int(math.log10(max(ms, 1))))}f}"


def speed_text(value):
    return f"{value:.2f}x" if value else ""


def percent(share):
    return f"{100 * share:.1f} %"


def span_text(dates):
    """The first and the last of dates in order."""
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def listed(words):
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def range_text(values):
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def dims_text(head_dim, head_dim_v):
    return f"d = {head_dim}" if head_dim == head_dim_v else f"d = {head_dim} / {head_dim_v}"


def size_text(head_dim, seqlen, head_dim_v=None):
    return f"{dims_text(head_dim, head_dim_v or head_dim)}, {short_length(seqlen)}"
