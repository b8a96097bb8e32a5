# SPDX-License-Identifier: Apache-2.0
"""Pictures of masks: a small one in block characters, and an SVG of bounded size."""

import torch

from .._core import arguments
from . import mask_forms

_TEXT_CELLS = 24
_MOST_TILES = 1 << 22  # tiles that a picture counts; mask.stats() counts any number
# Limits of repr, which takes a few milliseconds for any mask: it looks at a sample of the keys of larger ones.
_TEXT_TILES, _TEXT_COLUMNS, _TEXT_SAMPLE = 1 << 15, 1 << 14, 1531
_SHADES = "··", "░░", "▒▒", "▓▓", "██"
_EMPTY, _FULL = "#dedede", "#3b6fb6"
# Nothing visible, up to a quarter, half, three quarters, more.
_PARTIAL = "#fcf3dd", "#f6e0b0", "#f0c56c", "#e5a335", "#c77f12"


def _cell_side(mask, most):
    """The smallest power of two with which the longer side has at most `most` cells."""
    side = 1
    while -(-max(mask.seqlen_q, mask.seqlen_k) // side) > most:
        side *= 2
    return side


def _percent(share):
    return f"{100 * share:.3g} %"


def description(mask):
    """The numbers of a mask that need no look at its contents."""
    parts = [f"{mask.seqlen_q} query rows x {mask.seqlen_k} keys"]
    if mask.batch > 1 or mask.heads > 1:
        parts.append(f"batch {mask.batch}, heads {mask.heads}")
    if mask.causal:
        parts.append("causal")
    if mask.window is not None:
        parts.append(f"window {tuple(mask.window)}")
    if mask.q_offset is not None:
        parts.append(f"q_offset {mask.q_offset}")
    if mask.bounds is not None:
        parts.append(f"{mask.bounds.shape[-1]} bound{'s' if mask.bounds.shape[-1] > 1 else ''} per key")
    if mask.column_ptr is not None:
        parts.append(f"{mask.intervals.shape[0]} hidden intervals in lists")
    if mask.block_mask is not None:
        parts.append("block mask")
    if mask.q_pos is not None:
        parts.append("positions")
    if mask.device is not None:
        parts.append(str(mask.device))
    return ", ".join(parts)


def _is_readable(mask):
    """Tells if contents can be read: not of fake tensors or tensors without data, nor while a graph is captured."""
    lengths = isinstance(mask.seqlen_q, int) and isinstance(mask.seqlen_k, int)
    tensors = mask._tensors()
    made = torch.empty(0, device="cpu")  # fake under a FakeTensorMode
    real = all(type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type != "meta" for x in (*tensors, made))
    capturing = any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()
    return lengths and real and not capturing and not torch.compiler.is_compiling()


def text(mask):
    if not all(isinstance(x, torch.Tensor) for x in mask._tensors()):
        # Leaves that a tree_map put there.
        return f"Mask({mask.seqlen_q} x {mask.seqlen_k}, bounds={mask.bounds!r}, block_mask={mask.block_mask!r})"
    head = f"Mask({description(mask)})"
    if not _is_readable(mask) or mask.seqlen_q == 0 or mask.seqlen_k == 0:
        return head
    side = _cell_side(mask, _TEXT_CELLS)
    cells = _text_cells(mask, side)
    if cells is None:
        return f"{head}\nnot looked at, for its size: mask.plot() draws it and mask.stats() counts its tiles"
    visible, elements = cells
    # Shades by thirds of what is visible; only all of it is the last, only nothing the first.
    shade = torch.where(
        visible == elements, 4, torch.where(visible == 0, 0, 1 + (3 * visible // elements).clamp(max=2))
    )
    lines = ["".join(_SHADES[s] for s in row) for row in shade.tolist()]
    count = mask_forms.tile_count(mask) <= _TEXT_TILES and mask.batch * mask.heads * mask.seqlen_k <= _TEXT_COLUMNS
    is_sample = mask.seqlen_k > _TEXT_COLUMNS
    return "\n".join([head, *lines, _legend(mask, visible, elements, side, count, is_sample)])


def _text_cells(mask, side):
    """(visible, elements) of the cells of the picture in characters; None if even a sample would take long."""
    rows = mask_forms.TILE if mask.block_mask is not None else side
    if mask.seqlen_k <= _TEXT_COLUMNS and -(-mask.seqlen_q // rows) <= _TEXT_COLUMNS // 8:
        raster = mask_forms.raster(mask, 0, 0, side)
        return raster.visible, raster.elements
    return mask_forms.sampled_cells(mask, 0, 0, side, _TEXT_SAMPLE)


def _legend(mask, visible, elements, side, count, is_sample=False):
    """Describes the visible share of the drawn mask and, with `count`, the tiles of the whole mask."""
    share = _percent(int(visible.sum()) / max(int(elements.sum()), 1))
    parts = [f"visible about {share}, from a sample of keys" if is_sample else f"visible {share}"]
    if not count:
        parts.append("mask.stats() counts tiles")
    else:
        tiles = mask_forms.tile_count(mask)
        stats = mask.stats()
        parts.append(
            f"{tiles} tile{'s' if tiles != 1 else ''} of 128 x 128: "
            f"{stats.full_tiles} full, {stats.partial_tiles} partial, {stats.empty_tiles} empty"
        )
    if side > 1:
        parts.append(f"a cell is {side} x {side}")
    return "; ".join(parts)


def svg(mask, batch, head, max_cells):
    batch, head = arguments.integer("batch", batch), arguments.integer("head", head)
    side = _cell_side(mask, arguments.integer("max_cells", max_cells, 1, 128))
    rows, keys = -(-mask.seqlen_q // side), -(-mask.seqlen_k // side)
    scale = 480 / max(rows, keys, 1)
    width, height = max(keys * scale, 1), max(rows * scale, 1)
    raster = mask_forms.raster(mask, batch, head, side)
    count = mask_forms.tile_count(mask) <= _MOST_TILES
    note = f"{description(mask)}. {_legend(mask, raster.visible, raster.elements, side, count)}"
    which = f" (batch {batch}, head {head})" if mask.batch > 1 or mask.heads > 1 else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2:.6g} {height + 2:.6g}" '
        f'width="{width + 2:.6g}" role="img">'
        f"<title>Attention mask{which}: {note}</title>"
        f'<g transform="translate(1 1) scale({scale:.6g})" shape-rendering="crispEdges">'
        f'<rect width="{keys}" height="{rows}" fill="{_EMPTY}"/>{"".join(_paths(raster))}</g>'
        f'<rect x="0.5" y="0.5" width="{width + 1:.6g}" height="{height + 1:.6g}" fill="none" stroke="#888"/></svg>'
    )


def _paths(raster):
    """One path per colour, a run of equal cells in a row being one rectangle."""
    # Classes: 0 skipped, 1 to 5 partial with nothing visible or by quarters, 6 full.
    classes = torch.where(raster.visible == 0, 1, 2 + (4 * raster.visible // raster.elements).clamp(max=3))
    classes = torch.where(raster.skipped, 0, torch.where(raster.whole, 6, classes))
    edges = torch.ones_like(classes, dtype=torch.bool)
    edges[:, 1:] = classes[:, 1:] != classes[:, :-1]
    row, begin = edges.nonzero(as_tuple=True)
    end = torch.cat([begin[1:], begin.new_zeros(1)])
    end = torch.where(end == 0, classes.shape[1], end)  # the next run begins a row
    runs = zip(row.tolist(), begin.tolist(), end.tolist(), classes[row, begin].tolist())
    path = {}
    for y, x, until, kind in runs:
        if kind:
            path.setdefault(kind, []).append(f"M{x} {y}h{until - x}v1H{x}z")
    for kind, moves in sorted(path.items()):
        yield f'<path fill="{(_EMPTY, *_PARTIAL, _FULL)[kind]}" d="{"".join(moves)}"/>'
