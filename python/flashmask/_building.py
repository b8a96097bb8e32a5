# SPDX-License-Identifier: Apache-2.0
"""Shared by the mask builders: packed documents, masks from vectors, and checks that never wait for a device."""

import torch

from . import _arguments
from .errors import UnrepresentableMaskError
from .mask import Mask


class Documents:
    """Documents packed one after the other: what each token has to know of its own.

    position, begin, end, index: int64 [..., seqlen]: the token, where its document begins and ends, which one it is.
    last_begin [..., 1]: where the last document begins. cu_seqlens and count only where they are known without looking
    at the tokens. Past the last document begin and end are equal, so that the token is hidden from every row.
    name: what errors call the lengths, if not seqlens.
    """

    def __init__(self, cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device, name=None):
        given = {"cu_seqlens": cu_seqlens, "seqlens": seqlens, "doc_ids": doc_ids, "position_ids": position_ids}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"{' and '.join(given) + ' are' if given else 'nothing is'} given; "
                "it must be one of cu_seqlens, seqlens, doc_ids and position_ids"
            )
        ((kind, values),) = given.items()
        if seqlen is not None:
            seqlen = _arguments.length("seqlen", seqlen)
        values = as_lists(values)
        name = name or kind
        tensor = _arguments.integers(name, values, device, "[..., n]")
        in_lists = seqlen is None and not isinstance(values, torch.Tensor)
        if kind in ("doc_ids", "position_ids"):
            self._from_tokens(name, tensor, seqlen)
        elif kind == "seqlens":
            _arguments.check_values(name, tensor, tensor >= 0, "a length must be at least 0")
            ends = torch.nn.functional.pad(tensor.cumsum(-1), (1, 0))
            self._from_ends(name, ends, sum_of(values) if in_lists else seqlen)
            if seqlen is not None:
                _arguments.check_at_most(f"the sum of {name}", ends[..., -1], seqlen, "the length of the sequence")
        else:
            if tensor.shape[-1] == 0:
                raise ValueError("cu_seqlens is empty; it must begin with 0, then give the end of each document")
            _arguments.check_cu_seqlens(
                name, tensor, seqlen, "the length of the sequence", "; lengths go in as seqlens="
            )
            self._from_ends(name, tensor, largest_of(values) if in_lists else seqlen)

    def _from_ends(self, name, cu_seqlens, seqlen):
        self.cu_seqlens, self.count = cu_seqlens, cu_seqlens.shape[-1] - 1
        self.seqlen = length_or_total(name, cu_seqlens, seqlen)
        self.position = positions(self.seqlen, cu_seqlens)
        # Documents that end at or before the token.
        self.index = torch.searchsorted(cu_seqlens[..., 1:].contiguous(), self.position, right=True)
        self.begin = cu_seqlens.gather(-1, self.index)
        self.end = torch.cat([cu_seqlens[..., 1:], cu_seqlens[..., -1:]], -1).gather(-1, self.index)
        self.last_begin = cu_seqlens[..., max(self.count - 1, 0)][..., None]

    def _from_tokens(self, name, tokens, seqlen):
        self.cu_seqlens = self.count = None
        self.seqlen = tokens.shape[-1]
        if seqlen is not None and seqlen != self.seqlen:
            raise ValueError(
                f"seqlen is {seqlen}, but {name} has {self.seqlen} tokens; leave seqlen out, or make them equal"
            )
        step = 1 if name == "position_ids" else 0
        begins = torch.ones_like(tokens, dtype=torch.bool)
        begins[..., 1:] = tokens[..., 1:] != tokens[..., :-1] + step
        if name == "doc_ids":
            _check_ids(tokens, begins)
        self.position = positions(self.seqlen, tokens)
        self.index = begins.cumsum(-1) - 1
        self.begin = torch.where(begins, self.position, 0).cummax(-1).values
        self.end = next_flagged(begins, self.position, self.position.new_full((1,), self.seqlen))
        self.last_begin = self.begin[..., -1:] if self.seqlen else self.begin.new_zeros((*tokens.shape[:-1], 1))


def documents_or_one(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device):
    """The documents given, or one of all `seqlen` tokens."""
    if seqlen is not None and all(given is None for given in (cu_seqlens, seqlens, doc_ids, position_ids)):
        seqlen = _arguments.length("seqlen", seqlen)
        # A list's copy to the device would be waited for.
        seqlens = torch.full((1,), seqlen, dtype=torch.int64, device=device)
    return Documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen, device)


def _check_ids(ids, begins):
    """ValueError if a document's id comes back after another one, where the ids can be read."""
    if not _arguments.is_readable(ids):
        return
    at = begins.nonzero()
    named = torch.cat([at[:, :-1], ids[begins][:, None]], -1)  # batch entry and id of each document
    again = _first_repeat(named)
    if again is not None:
        raise ValueError(
            f"document id {int(named[again, -1])} comes back at {at[again].tolist()}; "
            "the tokens of a document must be contiguous"
        )


def check_blocks(ids, begins, document):
    """ValueError if a block's id comes back in its document after other tokens, where the ids can be read."""
    if not _arguments.is_readable(ids):
        return
    at = begins.nonzero()
    again = _first_repeat(torch.cat([at[:, :-1], document[begins][:, None], ids[begins][:, None]], -1))
    if again is not None:
        raise ValueError(
            f"block id {int(ids[tuple(at[again])])} comes back at {at[again].tolist()}; "
            "the tokens of a block must be contiguous, as a block in parts may need more than two "
            "row intervals per key column (from_dense takes it if it does not)"
        )


def _first_repeat(rows):
    """The first row of a matrix that was there before, or None."""
    _, which, count = rows.unique(dim=0, return_inverse=True, return_counts=True)
    if not bool((count > 1).any()):
        return None
    seen = torch.zeros_like(count).scatter_reduce(0, which, torch.arange(len(which)), "amin", include_self=False)
    return int((torch.arange(len(which)) > seen[which]).int().argmax())


def mask_of(seqlen_q, *vectors, causal=False, window=None):
    """A Mask of the vectors [seqlen_k], [batch, seqlen_k] or [batch, heads, seqlen_k]."""
    bounds = torch.stack(torch.broadcast_tensors(*vectors), -1).int()
    if bounds.ndim > 4:
        raise ValueError(f"the argument has {bounds.ndim - 2} leading dimensions; at most batch and heads are accepted")
    if bounds.ndim < 4:
        bounds = bounds.reshape(*((1,) if bounds.ndim == 2 else bounds.shape[:1]), 1, *bounds.shape[-2:])
    return Mask(seqlen_q, bounds.shape[2], bounds=bounds, causal=causal, window=window)


def positions(seqlen, like):
    """0, 1, ..., seqlen - 1 along the last dimension, the leading ones and the device as of `like`.

    Contiguous, as searchsorted wants it.
    """
    return torch.arange(seqlen, device=like.device).expand(*like.shape[:-1], -1).contiguous()


def next_flagged(flags, values, otherwise):
    """Of each entry the value at the next flagged one after it, or `otherwise` [..., 1]; values ascend."""
    values = torch.where(flags, values, otherwise)
    later = torch.cat([values[..., 1:], otherwise.expand(*values.shape[:-1], 1)], -1)[..., : values.shape[-1]]
    return later.flip(-1).cummin(-1).values.flip(-1)


def as_lists(values):
    """numpy's arrays as lists, which can be added up on the host."""
    return values.tolist() if hasattr(values, "tolist") and not isinstance(values, torch.Tensor) else values


def sum_of(lengths):
    """The largest total of lists of lengths, nested or not."""
    if lengths and isinstance(lengths[0], (list, tuple)):
        return max([sum_of(row) for row in lengths])
    return sum(lengths)


def largest_of(ends):
    """The largest number in lists, nested or not."""
    if ends and isinstance(ends[0], (list, tuple)):
        return max([largest_of(row) for row in ends])
    return max(ends) if ends else 0


def length_or_total(name, ends, seqlen):
    """seqlen, or the last of `ends` where it can be read without waiting."""
    if seqlen is not None:
        return _arguments.length("seqlen", seqlen)
    if not _arguments.is_readable(ends):
        raise ValueError(
            f"seqlen is missing; {name} is not read on the host "
            f"(it is on {ends.device}, or the code is being compiled), "
            "so the length of the sequence must be given"
        )
    return int(ends.max()) if ends.numel() else 0


def check_fits(need, what, advice):
    """UnrepresentableMaskError if a column needs more than two intervals; an assertion on a device that is not read."""
    if not _arguments.is_readable(need):
        torch._assert_async((need <= 2).all(), f"{what} does not fit two row intervals per key column; {advice}")
    elif bool((need > 2).any()):
        at = (need > 2).nonzero()[0].tolist()
        raise UnrepresentableMaskError(
            f"{what} does not fit two row intervals per key column: "
            f"column {at[-1]} needs {int(need[tuple(at)])}; {advice}",
            at[-1],
        )


def reach(window, seqlen):
    """How far a window of the last `window` keys reaches, -1 being all of them."""
    window = _arguments.integer("window", window)
    if window < 1 and window != -1:
        raise ValueError(f"window is {window}; it must be at least 1, or -1 for all")
    return seqlen if window == -1 else min(window, seqlen)


def random_bits(counter, seed):
    """63 random bits for each counter: splitmix64 in wrapping int64 arithmetic, the same on every device."""

    def signed(constant):
        return constant - (1 << 64) if constant >= 1 << 63 else constant

    def shifted(x, by):
        return (x >> by) & ((1 << (64 - by)) - 1)

    x = counter * signed(0x9E3779B97F4A7C15) + signed((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % (1 << 64))
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    return shifted(x ^ shifted(x, 31), 1)
