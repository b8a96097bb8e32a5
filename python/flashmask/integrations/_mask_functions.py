# SPDX-License-Identifier: Apache-2.0
"""Masks from the mask functions of transformers.masking_utils, without an N x N matrix where they are understood.

A mask function says for indices (batch, head, query, key) what is visible. transformers makes them by factories that
combine others; their parts are read here, and an exact rule for each key is computed from them in O(seqlen). What has
other parts is looked at in all its elements, some rows at a time.
"""

import functools
import inspect
import time
import types
import warnings
from typing import NamedTuple

import torch
import transformers
from transformers import masking_utils

from .._core.errors import UnsupportedError
from ..torch._torch_internals import assert_async
from ..torch.mask import Mask

# Elements of a mask that is not understood, batch x rows x keys: half a minute of one CPU core.
MOST_ELEMENTS = 1 << 32
_CHUNK = 1 << 24  # elements looked at together

# --- Parts of a function --------------------------------------------------------------------------

_NAMES = (
    "and_masks",
    "or_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    "blockwise_overlay",
    "packed_sequence_mask_function",
)
_LATER_NAMES = ("remap_positions_for_packed_sequence",)  # not in 5.17
for _name in _NAMES:
    if not hasattr(masking_utils, _name):
        raise ImportError(
            "flashmask.integrations is written for transformers 5.17 to 5.23, and "
            f"{transformers.__version__} has no transformers.masking_utils.{_name}"
        )
_FACTORIES = {getattr(masking_utils, name): name for name in (*_NAMES, *_LATER_NAMES) if hasattr(masking_utils, name)}
# The code of what a factory returns is a constant of the factory's own code.
_MADE_BY = {
    constant: factory
    for factory in _FACTORIES
    for constant in factory.__code__.co_consts
    if isinstance(constant, types.CodeType)
}


class _NotUnderstood(Exception):
    """A mask function, or a combination of them, has no rule here."""


def _parts(function):
    """(name of the factory, its arguments) of what it returned."""
    if torch.compiler.is_compiling():
        if not hasattr(function, "flashmask_parts"):
            raise _NotUnderstood
        return function.flashmask_parts
    factory = _MADE_BY.get(getattr(function, "__code__", None))
    if factory is None:
        raise _NotUnderstood
    cells = dict(zip(function.__code__.co_freevars, function.__closure__))
    arguments = []
    for name, parameter in inspect.signature(factory).parameters.items():
        value = cells[name].cell_contents
        arguments.extend(value if parameter.kind is parameter.VAR_POSITIONAL else [value])
    return _FACTORIES[factory], tuple(arguments)


@functools.cache  # once
def make_traceable():
    """torch.compile cannot read a closure: in its traces the factories note their arguments on what they return."""
    for factory, name in _FACTORIES.items():
        _note_arguments(factory, name)


def _note_arguments(factory, name):
    # A copy, or the substitution would apply in here, too.
    original = types.FunctionType(factory.__code__, factory.__globals__, factory.__name__)

    def noted(*arguments, **by_name):
        made = original(*arguments, **by_name)
        made.flashmask_parts = (name, (*arguments, *by_name.values()))
        return made

    torch.compiler.substitute_in_graph(factory, skip_signature_check=True)(noted)


# --- The rule of a function -----------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows that see a key, by positions: key + first <= row < key + last and begin <= row < end.

    first and last are ints, begin and end tensors [batch or 1, keys]; None is unbounded. `nowhere` (bool, likewise)
    marks keys that no row sees. The rows of all others contain the key's own position, so that two rules always meet.
    """

    first: int | None = None
    last: int | None = None
    begin: torch.Tensor | None = None
    end: torch.Tensor | None = None
    nowhere: torch.Tensor | None = None


def _rows(function, key, is_remapped=False):
    """The _Rows of keys at the positions `key` [batch or 1, keys]; raises _NotUnderstood.

    is_remapped: the positions are those within documents.
    """
    if function is masking_utils.causal_mask_function:
        return _Rows(first=0)
    if function is masking_utils.bidirectional_mask_function:
        return _Rows()
    name, arguments = _parts(function)
    if name == "and_masks":
        return functools.reduce(_both, _combined_rules(arguments, key, is_remapped))
    if name == "or_masks":
        rules = [_rows(part, key, is_remapped) for part in arguments]
        return functools.reduce(functools.partial(_either, key), rules)
    if name == "sliding_window_overlay" and arguments[0] > 0:
        return _Rows(last=arguments[0])
    if name == "sliding_window_bidirectional_overlay":
        return _Rows(first=-arguments[0], last=arguments[0] + 1)
    if name == "chunked_overlay":
        size, padding = arguments
        begin = key - (key - padding[:, None]) % size
        return _Rows(begin=begin, end=begin + size)
    if name == "packed_sequence_mask_function" and not is_remapped:
        _check_contiguous(arguments[0] - arguments[0].min(), "document")
        return _runs(arguments[0], key)
    if name == "blockwise_overlay" and not is_remapped:
        _check_contiguous(arguments[0], "block")
        return _runs(arguments[0], key)._replace(nowhere=_at(arguments[0], key) < 0)
    raise _NotUnderstood


def _combined_rules(functions, key, is_remapped):
    """The rules of what and_masks combines."""
    documents = [_parts(x)[1][0] for x in functions if _name_of(x) == "packed_sequence_mask_function"]
    rules = []
    for function in functions:
        if documents and _name_of(function) == "remap_positions_for_packed_sequence":
            # Within a document, which is all that is left of this rule, positions are as far apart as the tokens.
            function, positions = _parts(function)[1]
            _check((positions.diff(dim=1) == 1) | (documents[0].diff(dim=1) != 0), "positions within a document")
            rule = _rows(function, positions, True)
            begin, end = (None if x is None else x + (key - positions) for x in (rule.begin, rule.end))
            rules.append(rule._replace(begin=begin, end=end))
        else:
            rules.append(_rows(function, key, is_remapped))
    return rules


def shown_rows(padding, q_length, q_offset):
    """`padding` [batch, positions] of the query rows, whose first position is q_offset; False where there is none."""
    rows = torch.arange(q_length, device=padding.device) + q_offset
    positions = padding.shape[1]
    if positions == 0:
        return padding.new_zeros(padding.shape[0], q_length)
    return padding[:, rows.clamp(max=positions - 1)] & (rows < positions)


def separates_documents(function):
    """Tells if a part of a mask function keeps packed documents apart, or might."""
    try:
        name, arguments = _parts(function)
    except _NotUnderstood:
        return function not in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if name in ("and_masks", "or_masks"):
        return any(separates_documents(part) for part in arguments)
    return name == "packed_sequence_mask_function"


def _name_of(function):
    try:
        return _parts(function)[0]
    except _NotUnderstood:
        return None


def _both(a, b):
    return _Rows(
        _combined(max, a.first, b.first),
        _combined(min, a.last, b.last),
        _combined(torch.maximum, a.begin, b.begin),
        _combined(torch.minimum, a.end, b.end),
        _combined(torch.logical_or, a.nowhere, b.nowhere),
    )


def _combined(function, a, b):
    return b if a is None else a if b is None else function(a, b)


def _either(key, a, b):
    nowhere = None if a.nowhere is None or b.nowhere is None else a.nowhere & b.nowhere
    (a_begin, a_end), (b_begin, b_end) = _ends(a, key), _ends(b, key)
    begin = None if a_begin is None or b_begin is None else torch.minimum(a_begin, b_begin)
    end = None if a_end is None or b_end is None else torch.maximum(a_end, b_end)
    return _Rows(begin=begin, end=end, nowhere=nowhere)


def _ends(rule, key):
    """(begin, end) as tensors or None; a key that no row sees has its own position."""
    begin = _combined(torch.maximum, None if rule.first is None else key + rule.first, rule.begin)
    end = _combined(torch.minimum, None if rule.last is None else key + rule.last, rule.end)
    if rule.nowhere is not None:
        begin = key if begin is None else torch.where(rule.nowhere, key, begin)
        end = key + 1 if end is None else torch.where(rule.nowhere, key + 1, end)
    return begin, end


# --- Runs of equal ids ----------------------------------------------------------------------------


def _runs(ids, key):
    """Each key is seen by the rows of its own run of equal ids [batch, positions]."""
    begin, end = run_ends(ids)
    return _Rows(begin=_at(begin, key), end=_at(end, key))


def run_ends(ids):
    """(begin, end) of the run of equal values that each element of `ids` [batch, positions] is in."""
    place = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    changes = ids[:, 1:] != ids[:, :-1]
    edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
    begin = torch.where(torch.cat([edge, changes], 1), place, 0).cummax(1).values
    end = torch.where(torch.cat([changes, edge], 1), place + 1, ids.shape[-1])
    return begin, end.flip(1).cummin(1).values.flip(1)


def _at(values, key):
    """`values` [batch, positions] at `key` [1, keys], which are consecutive positions."""
    return values[:, key[0]]


def _check_contiguous(ids, what):
    """Each id that is not negative must be one run, or the rows of a key were not contiguous."""
    _check(_changes(ids.sort(1).values).sum() == _changes(ids).sum(), f"the tokens of a {what}")


def _check(fits, what):
    """Raises _NotUnderstood; in a trace, where nothing can be read, an assertion becomes part of the work."""
    if torch.compiler.is_compiling():
        assert_async(fits.all(), f"{what} in the model's mask do not follow each other")
    elif not fits.all():
        raise _NotUnderstood


def _changes(ids):
    """Marks where a run of a non-negative id begins."""
    edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
    return torch.cat([edge, ids[:, 1:] != ids[:, :-1]], 1) & (ids >= 0)


# --- The mask -------------------------------------------------------------------------------------


def mask_of(function, batch, q_length, kv_length, q_offset, kv_offset, padding, use_vmap, device):
    """The Mask of a mask function whose rows begin at position q_offset and whose keys at kv_offset.

    padding: bool [batch, positions], False where a key is hidden; None: nowhere.
    """
    key = torch.arange(kv_length, device=device)[None] + kv_offset
    try:
        rule = _rows(function, key)
    except _NotUnderstood:
        return _by_elements(function, batch, q_length, kv_length, q_offset, kv_offset, padding, use_vmap, device)
    if padding is not None:
        shown = padding[:, kv_offset : kv_offset + kv_length]
        missing = kv_length - shown.shape[1]
        shown = torch.nn.functional.pad(shown, (0, missing)) if missing else shown
        rule = _both(rule, _Rows(nowhere=~shown))
    return _rule_mask(rule, key, q_length, kv_length, q_offset, kv_offset)


def _rule_mask(rule, key, q_length, kv_length, q_offset, kv_offset):
    if isinstance(q_offset, torch.Tensor):
        # A static cache's: its value goes into the intervals, so that a compiled step fits every place.
        begin, end = _ends(rule._replace(nowhere=None), key)
        return _interval_mask(rule._replace(begin=begin, end=end), False, None, q_length, kv_length, q_offset, None)
    causal = rule.first == 0
    window = None
    if rule.last is not None or rule.first not in (None, 0):
        right = 0 if causal else -1 if rule.first is None else -rule.first
        window = (-1 if rule.last is None else rule.last - 1, right)
    if causal:
        rule = rule._replace(begin=None)  # it is at most the key's own position
    return _interval_mask(rule, causal, window, q_length, kv_length, q_offset, q_offset - kv_offset)


def _interval_mask(rule, causal, window, q_length, kv_length, q_offset, band_offset):
    """A mask of the rule's tensors and the given band."""
    band = {"causal": causal, "window": window, "q_offset": band_offset}
    if rule.begin is None and rule.end is None and rule.nowhere is None:
        return Mask(q_length, kv_length, **band)
    like = next(x for x in rule[2:] if x is not None)
    lts = torch.full_like(like, q_length, dtype=torch.int64) if rule.end is None else rule.end - q_offset
    lts = lts.clamp(0, q_length)
    lts = lts if rule.nowhere is None else torch.where(rule.nowhere, 0, lts)
    vectors = [lts]
    if not causal:
        ute = torch.zeros_like(lts) if rule.begin is None else (rule.begin - q_offset).clamp(0, q_length)
        vectors = torch.broadcast_tensors(lts, ute)
    return Mask(q_length, kv_length, bounds=torch.stack(vectors, -1)[:, None].to(torch.int32), **band)


def within_documents(mask, cu_seqlens, batch):
    """`mask`, of a call with so many batch entries, with what crosses the documents' ends hidden as well.

    cu_seqlens: [documents + 1], of all entries one after the other. UnsupportedError if the mask has other intervals of
    its own.
    """
    is_plain = mask.bounds is None or mask.bounds.shape[-1] == (1 if mask.causal else 2)
    if not is_plain or mask.block_mask is not None or mask.column_ptr is not None:
        raise UnsupportedError(
            "cu_seq_lens beside a mask with two intervals, lists of them or blocks is not implemented; give the whole "
            "mask as mask="
        )
    if mask.seqlen_q != mask.seqlen_k:
        raise UnsupportedError(
            f"cu_seq_lens with {mask.seqlen_q} query rows and {mask.seqlen_k} keys (a cache) is not implemented"
        )
    place = torch.arange(batch * mask.seqlen_k, device=cu_seqlens.device).view(batch, mask.seqlen_k)
    begin, end = run_ends(torch.searchsorted(cu_seqlens.to(place.dtype), place, right=True))
    bounds = end[..., None] if mask.causal else torch.stack([end, begin], -1)
    bounds = bounds[:, None].to(torch.int32)
    if mask.bounds is not None:
        lower = torch.minimum(bounds[..., :1], mask.bounds[..., :1])
        upper = [] if mask.causal else [torch.maximum(bounds[..., 1:], mask.bounds[..., 1:])]
        bounds = torch.cat([lower, *upper], -1)
    return mask.replace(bounds=bounds)


# --- Masks that are not understood ----------------------------------------------------------------

_said = set()


def _by_elements(function, batch, q_length, kv_length, q_offset, kv_offset, padding, use_vmap, device):
    """The mask of all elements of a function, a few rows at a time."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            f"the mask function {name} has parts that are not understood, so it cannot be traced; "
            "give the model a flashmask.Mask as mask="
        )
    if (elements := batch * q_length * kv_length) > MOST_ELEMENTS:
        raise UnsupportedError(
            f"the mask function {name} has parts that are not understood, and its {elements} elements "
            f"(batch {batch}, {q_length} rows, {kv_length} keys) are more than {MOST_ELEMENTS}, up to which all are "
            "looked at; give the model a flashmask.Mask as mask="
        )

    def rows(begin, end):
        return masking_utils.sdpa_mask(
            batch,
            end - begin,
            kv_length,
            q_offset + begin,
            kv_offset,
            function,
            padding,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )

    started = time.perf_counter()
    mask = mask_from_rows(rows, q_length, kv_length)
    if name not in _said:
        _said.add(name)
        seconds = time.perf_counter() - started
        warnings.warn(
            f"the mask function {name} has parts that are not understood; all its {elements} elements were looked at, "
            f"in {seconds:.2g} s, as in every forward: a flashmask.Mask given as mask= saves that",
            stacklevel=2,
        )
    return mask


def mask_from_rows(rows, q_length, kv_length):
    """The mask of rows(begin, end), which are bool [batch, heads, end - begin, kv_length], exactly.

    A column that needs more than two intervals gives the mask interval lists.
    """
    if q_length == 0 or kv_length == 0:
        return Mask(q_length, kv_length)
    changes, before = [], None
    for begin in range(0, q_length, step := max(1, _CHUNK // kv_length)):
        visible = rows(begin, min(begin + step, q_length))
        before = torch.ones_like(visible[:, :, :1]) if before is None else before
        batch, head, row, column = (visible ^ torch.cat([before, visible[:, :, :-1]], 2)).nonzero().unbind(1)
        before = visible[:, :, -1:]
        changes.append(torch.stack([(batch * visible.shape[1] + head) * kv_length + column, row + begin]))
    changes = torch.cat(changes, 1)
    runs, count = _hidden_runs(changes, before.numel(), q_length)
    runs, count = (x.view(*before.shape[:2], kv_length, -1) for x in (runs, count))
    diagonal = (torch.arange(kv_length, device=runs.device) - (kv_length - q_length)).clamp(0, q_length)
    first_stop = torch.where(runs[..., 0] == 0, runs[..., 1], 0)
    causal = bool((first_stop >= diagonal).all())
    if causal:
        # A run that ends there is the band's.
        is_bands = (first_stop == diagonal) & (diagonal > 0)
        runs = torch.where(is_bands[..., None], runs.roll(-2, -1), runs)
        count = count - is_bands[..., None].long()
    if (count > 2).any():
        return Mask(q_length, kv_length, **_lists(changes, before.shape[:2], kv_length, q_length))
    # The causal flag leaves room for one interval, a band for two.
    vectors = 2 if causal and not (count > 1).any() else 4
    band = {} if not causal else {"causal": True} if vectors == 2 else {"window": (-1, 0)}
    return Mask(q_length, kv_length, bounds=runs[..., :vectors].to(torch.int32), **band)


_CHANGES = 6  # changes in a column with two intervals and a band


def _lists(changes, masks, kv_length, q_length):
    """The interval lists of all runs of hidden rows, of `changes` as _hidden_runs takes them."""
    column, row, place, number = _places(changes, masks.numel() * kv_length, q_length)
    ends = torch.nn.functional.pad(((number + 1) // 2).cumsum(0), (1, 0))
    intervals = row.new_full((2 * int(ends[-1]),), q_length)  # where a run reaches the last row
    intervals[2 * ends[column] + place] = row
    column_ptr = torch.cat([ends[:-1].view(*masks, kv_length), ends[kv_length::kv_length].view(*masks, 1)], -1)
    return {"column_ptr": column_ptr.to(torch.int32), "intervals": intervals.view(-1, 2).to(torch.int32)}


def _hidden_runs(changes, columns, q_length):
    """(runs, count): [columns, 6], begin and end of the first three runs of hidden rows; [columns], how many there are.

    changes: [2, n], the columns and rows where hidden and visible ones take turns, of which the first rows are visible.
    """
    column, row, place, number = _places(changes, columns, q_length)
    runs = row.new_full((columns, _CHANGES + 1), q_length)  # the last for those beyond
    runs[column, place.clamp(max=_CHANGES)] = row
    return runs[:, :_CHANGES], (number + 1) // 2


def _places(changes, columns, q_length):
    """(column, row, place, number): the changes in order, the place of each in its column, and how many each has."""
    column, row = changes[:, (changes[0] * q_length + changes[1]).argsort()]
    number = torch.bincount(column, minlength=columns)
    return column, row, torch.arange(len(column), device=column.device) - (number.cumsum(0) - number)[column], number
