# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache: what frontends read off shapes alone."""

from collections.abc import Sequence

KEY_LAYOUTS = ("auto", "sequences", "pages")
Shape = Sequence[int]


def key_layout(
    given: str, bounds: Shape | None, k_pos: Shape | None, cache: Shape, batch: int | None, has_tables: bool
) -> str:
    """How bounds and k_pos of these shapes (None: absent) lie: "sequences" or "pages", which "auto" finds out.

    cache: the shape [pages, page_size, heads_kv, head_dim] of its keys. batch: None if rows belong to no request.

    Raises ValueError naming key_layout if the shapes fit both layouts, or neither.
    """
    if given != "auto":
        return given
    if bounds is None and (k_pos is None or not has_tables):
        return "sequences"  # the keys of a contiguous cache have one order
    pages, page_size, heads_kv = cache[:3]
    entries, heads = (() if batch is None else (1, batch)), (1, heads_kv)
    # Ranks and vectors are the library's to check.
    by_sequence = _fit((bounds, (entries, heads)), (k_pos, (entries,)))
    by_page = _fit((bounds, ((pages,), (page_size,), heads)), (k_pos, ((pages,), (page_size,))))
    if by_sequence != by_page:
        return "sequences" if by_sequence else "pages"
    shapes = " and ".join(f"{name} {list(x)}" for name, x in (("bounds", bounds), ("k_pos", k_pos)) if x is not None)
    raise ValueError(
        f"key_layout is 'auto' and {shapes} {'fits both' if by_page else 'fits neither of'} 'sequences' (batch "
        f"{batch}, {heads_kv} heads_kv) and 'pages' ({pages} of {page_size} keys); "
        f"{'say which it is' if by_page else 'see SequenceMask for their shapes'}"
    )


def check_page_table(table: object) -> None:
    """ValueError if it is a tuple or list, but no pair."""
    if isinstance(table, (tuple, list)) and len(table) != 2:
        raise ValueError(f"page_table has {len(table)} entries; it must be an array or (indptr, indices)")


def _fit(*arrays: tuple[Shape | None, tuple[Shape, ...]]) -> bool:
    """True if the first dimensions of each shape that is there are among the accepted ones."""
    return all(
        shape is None or len(shape) >= len(accepted) and all(n in few for n, few in zip(shape, accepted))
        for shape, accepted in arrays
    )
