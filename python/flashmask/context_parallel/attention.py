# SPDX-License-Identifier: Apache-2.0
"""Attention of a sequence whose rows are spread over the ranks of a process group."""

import torch
import torch.distributed as dist

from .. import _gather, merge, ops
from .local_mask import LocalMask


@torch.compiler.disable
def attention(
    q,
    k,
    v,
    local,
    *,
    group=None,
    softmax_scale=None,
    deterministic=None,
    backend="auto",
    max_ctas=0,
    return_lse=False,
    check=None,
):
    """Masked attention of this rank's rows over all keys that they see: out, differentiable in q, k and v.

    All ranks of the group call it, and later its backward. Keys and values that other ranks' rows see travel in pieces
    while tiles of the keys at hand run; partial results are merged in float32. The gradients of keys and values that
    travelled return to their owners in float32 and are added up in a fixed order.

    Args:
        q: [batch, rows, heads_q, head_dim]; k, v: [batch, rows, heads_kv, head_dim or head_dim_v]: this rank's rows, as
            placement.shard(x, rank) has them.
        local: the LocalMask of this rank, placement.mask(rank), on the tensors' device.
        group: the process group, its ranks in the placement's order; None: the default one.
        softmax_scale, deterministic, backend, max_ctas: as in flashmask_attention. With max_ctas multiprocessors are
            left to communication.
        return_lse: also return lse, [batch, heads_q, rows].
        check: compare the mask, the placement and the shapes of all ranks first. None: only where torch.distributed's
            debug level is not OFF (TORCH_DISTRIBUTED_DEBUG).

    Raises:
        TypeError, ValueError: an argument is wrong, or, with check, ranks disagree; the message names them.
        UnsupportedError: the backend has no partial results, which CUDA has not yet.
    """
    if not isinstance(local, LocalMask):
        raise TypeError(f"local is a {type(local).__name__}; it must be a LocalMask, as placement.mask(rank) makes it")
    ops.check_dimensions(q, k, v, "bshd")
    softmax_scale, deterministic, max_ctas = ops.read_options(softmax_scale, deterministic, backend, max_ctas)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    _check_group(local, group)
    if dist.get_debug_level() != dist.DebugLevel.OFF if check is None else check:
        _check_agreement(q, k, v, local, group, (softmax_scale, deterministic))
    ops.check_lengths(local.own, q, k, "bshd")
    q, k, v = ops.autocast(q, k, v)
    out, lse = _Attention.apply(q, k, v, local, group, (softmax_scale, deterministic, backend, max_ctas))
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, local, group, options):
        exchanges = [_send_keys(k, v, piece, group) for piece in local.pieces]
        parts = [_forward(q, k, v, local.own, options)]
        for piece, exchange in zip(local.pieces, exchanges):
            received = exchange.wait()
            if received:
                parts.append(_forward(q, *_keys_of(received, k), piece.mask, options))
        # The same in every run, as the order of the parts is.
        out, lse = parts[0] if len(parts) == 1 else merge.merge_attention(*zip(*parts))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = local, group, options
        ctx.set_materialize_grads(False)
        return out.to(q.dtype, copy=True), lse.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        local, group, options = ctx.call
        # A rank whose result is not used takes part all the same: others wait for its keys.
        dout = torch.zeros_like(out, dtype=q.dtype) if dout is None else dout
        saved = out, lse, options
        exchanges = [_send_keys(k, v, piece, group) for piece in local.pieces]
        dq, dk, dv = _backward(dout, dlse, q, k, v, local.own, *saved)
        returns = []
        for piece, exchange in zip(local.pieces, exchanges):
            received, dkv = exchange.wait(), None
            if received:
                part = _backward(dout, dlse, q, *_keys_of(received, k), piece.mask, *saved)
                dq += part[0]
                dkv = torch.cat(part[1:], -1)
            returns.append(_return_gradients(dkv, k, v, dq.dtype, piece, group))
        for piece, exchange in zip(local.pieces, returns):
            for (_, segments), part in zip(piece.sends, exchange.wait()):
                at = 0
                for begin, end in segments:
                    own = part[:, at : at + end - begin]
                    dk[:, begin:end] += own[..., : k.shape[3]]
                    dv[:, begin:end] += own[..., k.shape[3] :]
                    at += end - begin
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


# --- The calls --------------------------------------------------------------------------------------


def _forward(q, k, v, mask, options):
    softmax_scale, deterministic, backend, max_ctas = options
    return ops.attention(
        q,
        k,
        v,
        mask,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
        backend=backend,
        max_ctas=max_ctas,
        partial_out=True,
    )


def _backward(dout, dlse, q, k, v, mask, out, lse, options):
    """dq, dk and dv in float32: what these keys add to them, given out and lse of all keys."""
    softmax_scale, deterministic, backend, max_ctas = options
    return ops.partial_backward(dout, dlse, q, k, v, out, lse, mask, softmax_scale, deterministic, backend, max_ctas)


def _keys_of(received, k):
    """k and v of the keys of a piece; views of what arrived."""
    kv = received[0] if len(received) == 1 else torch.cat(received, 1)
    return kv[..., : k.shape[3]], kv[..., k.shape[3] :]


# --- What travels -----------------------------------------------------------------------------------


class _Exchange:
    """Messages on their way. wait() gives those that arrive, in the order of `shapes`."""

    def __init__(self, outgoing, incoming, group):
        """outgoing: (peer, tensor); incoming: (peer, tensor to receive into)."""
        self._outgoing, self._incoming = outgoing, incoming  # they have to live until all is done
        operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in outgoing]
        operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in incoming]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self):
        for work in self._works:
            work.wait()
        return [x for _, x in self._incoming]


def _send_keys(k, v, piece, group):
    """k and v side by side, so that a key is one message's part."""
    shape = k.shape[2], k.shape[3] + v.shape[3]
    outgoing = [(peer, torch.cat([_gather.take(x, s, 1) for x in (k, v)], -1)) for peer, s in piece.sends]
    incoming = [(peer, k.new_empty((k.shape[0], keys, *shape))) for peer, keys in piece.receives]
    return _Exchange(outgoing, incoming, group)


def _return_gradients(dkv, k, v, dtype, piece, group):
    """The other way round: gradients of the keys that arrived leave, those of the keys that were sent arrive."""
    shape = k.shape[2], k.shape[3] + v.shape[3]
    counts = [keys for _, keys in piece.receives]
    parts = [x.contiguous() for x in dkv.split(counts, 1)] if counts else []
    outgoing = [(peer, x) for (peer, _), x in zip(piece.receives, parts)]
    incoming = [
        (peer, k.new_empty((k.shape[0], sum(e - b for b, e in segments), *shape), dtype=dtype))
        for peer, segments in piece.sends
    ]
    return _Exchange(outgoing, incoming, group)


# --- Checks -----------------------------------------------------------------------------------------


def _check_group(local, group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if (size, rank) != (local.world_size, local.rank):
        raise ValueError(
            f"group has {size} ranks and this is rank {rank}; "
            f"local was made for rank {local.rank} of {local.world_size}"
        )


def _check_agreement(q, k, v, local, group, options):
    own = {
        "the mask or the placement": local.digest,
        "shapes of q, k and v": [(x.shape[0], *x.shape[2:]) for x in (q, k, v)],
        "dtypes": [str(x.dtype) for x in (q, k, v)],
        "options (softmax_scale, deterministic)": options,
    }
    every = [None] * local.world_size
    dist.all_gather_object(every, own, group)
    for what in own:
        others = [rank for rank, its in enumerate(every) if its[what] != every[0][what]]
        if others:
            given = "" if what.startswith("the mask") else f": {every[0][what]} and {every[others[0]][what]}"
            raise ValueError(f"ranks disagree: {what} of ranks {others} are not those of rank 0{given}")
