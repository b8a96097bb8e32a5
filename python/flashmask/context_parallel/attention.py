# SPDX-License-Identifier: Apache-2.0
"""Attention of a sequence whose rows are spread over the ranks of a process group."""

import hashlib
import warnings
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from .._core import arguments, call_options
from .._core.annotations import Backend
from .._core.errors import UnsupportedError
from ..torch import ops
from ..torch.dropout import draw_state
from . import by_arrival, cost, exchange, messages
from .by_heads import AllToAll
from .by_keys import Gather, Options, Overlap, has_partial_results
from .local_mask import LocalMask

Way: TypeAlias = Literal["auto", "gather", "arrive", "overlap", "all_to_all"]
WAYS: dict[str, Any] = {"gather": Gather, "arrive": by_arrival.Arrive, "overlap": Overlap, "all_to_all": AllToAll}
_MOST_TIMEOUT = 1e6


@torch.compiler.disable
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    local: LocalMask,
    *,
    group: Any = None,
    way: Way = "auto",
    softmax_scale: float | None = None,
    deterministic: bool | None = None,
    backend: Backend = "auto",
    max_ctas: int = 0,
    sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    dropout: float = 0.0,
    dropout_state: torch.Tensor | None = None,
    return_lse: bool = False,
    arrival_timeout: float = 60.0,
    check: bool | None = None,
    **others: Any,
) -> Any:
    """Masked attention of this rank's rows over all keys that they see: out, differentiable in q, k, v and the sink.

    All ranks of the group call it, and later its backward. Tensors travel through torch.distributed, and gradients of
    keys and values that travelled are summed in float32, in a fixed order.

    Args:
        q: [batch, rows, heads_q, head_dim]; k, v: [batch, rows, heads_kv, head_dim or head_dim_v]: this rank's rows, as
            placement.shard(x, rank) returns them.
        local: the LocalMask of this rank, placement.mask(rank), on the tensors' device.
        group: the process group, its ranks in the placement's order; None: the default one.
        way: "gather": the keys and values that the rank's rows see travel to it, and one call runs when they have
            arrived; "arrive": that call runs at once, and waits as it comes to keys for their copy from their owners'
            memory (Hopper GPUs of one machine; "gather", with a warning, where they cannot reach each other's memory),
            and its backward is that of "gather"; "overlap": keys travel in pieces while tiles of the keys at hand run,
            and partial results are merged in float32; "all_to_all": q, k and v change from rows to heads, and out back
            (for numbers of heads that the ranks can share). "auto": the cost model's choice, see Placement.explain,
            which is never "arrive".
        softmax_scale, deterministic, backend, max_ctas: as in flashmask_attention. With max_ctas multiprocessors are
            left to communication.
        sink, softcap, alibi_slopes: as in flashmask_attention, equal on all ranks: [heads_q], slopes also [batch,
            heads_q]. Distances are those of the whole sequence. A rank's gradient of the sink is its share, of its rows
            or, with "all_to_all", of its heads, with 0 for others: as of any parameter, the sum over the ranks is the
            gradient. Slopes have none. On a GPU softcap and slopes together need "all_to_all", and with either, what
            each rank's rows add to dk and dv, and results of parts in "overlap", are rounded to q's dtype before they
            are added.
        dropout, dropout_state: as in flashmask_attention, equal on all ranks: what is dropped is what one process would
            drop, by the rows, keys and heads of the whole sequence. Without a state, rank 0 draws one and sends it to
            the others. All ways but "all_to_all" need ranks whose rows begin at multiples of 16. On a GPU dropout is
            like softcap above.
        arrival_timeout: seconds that a call with "arrive" waits for keys. After them its results are NaN, and the next
            call raises a TimeoutError that names the rank.
        return_lse: also return lse, [batch, heads_q, rows].
        check: compare the mask, the placement, shapes, options, sinks, slopes and states of all ranks first. None: only
            if torch.distributed's debug level is not OFF (TORCH_DISTRIBUTED_DEBUG).
        others: split_size of flashmask_attention; anything but its default is refused.

    Raises:
        TypeError, ValueError: an argument is wrong, or, with check, ranks disagree; the message names them.
        TimeoutError: keys of an earlier call did not arrive.
        UnsupportedError: no backend takes the call, or a feature is asked for that is not implemented.
    """
    call_options.refuse_features(
        others,
        "context parallelism does not implement it: kernels count splits from the first key of their own call, which "
        "has a part of the sequence's",
    )
    if not isinstance(local, LocalMask):
        raise TypeError(f"local is a {type(local).__name__}; it must be a LocalMask, as placement.mask(rank) makes it")
    ops.check_dimensions(q, k, v, "bshd")
    arguments.choice("way", way, ("auto", *WAYS))
    softmax_scale, deterministic, max_ctas = ops.read_options(softmax_scale, deterministic, backend, max_ctas)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    features = _read_features(q, softcap, sink, alibi_slopes, dropout, dropout_state)
    arrival_timeout = _read_timeout(arrival_timeout)
    _check_group(local, group)
    if dist.get_debug_level() != dist.DebugLevel.OFF if check is None else check:
        agreed = way, softmax_scale, deterministic, return_lse, softcap, dropout
        _check_agreement(q, k, v, sink, alibi_slopes, dropout_state, local, group, agreed)
    ops.check_lengths(local.own, q, k, "bshd")
    q, k, v = ops.autocast(q, k, v)
    of_kernel = ops.KernelOptions(softmax_scale, deterministic, backend, max_ctas)
    options = Options(of_kernel, bool(return_lse), features, arrival_timeout)
    way = _way(way, q, k, local, options.features(sink, alibi_slopes))
    if options.drops:
        features["dropout_state"] = _shared_state(dropout_state, q.device, group)
        local = local.in_sixteens(q.device)
    if way == "arrive":
        way = _arrive_or_gather(k, v, local, group)
    out, lse = WAYS[way].apply(q, k, v, sink, alibi_slopes, local, group, options)
    return (out, lse) if return_lse else out


def _way(way, q, k, local, features):
    heads = q.shape[2], k.shape[2]
    if way == "auto":
        way = local.way(heads, q.shape[3])
    elif way == "all_to_all" and not cost.divide(*heads, local.world_size):
        raise ValueError(
            f"way is 'all_to_all'; {local.world_size} ranks cannot share {heads[0]} query and {heads[1]} key heads: "
            f"heads_q must be a multiple of the ranks, and one of heads_kv and ranks a multiple of the other"
        )
    elif way == "arrive" and local.world_size > 1 and (why := exchange.refusal(q.device)):
        raise UnsupportedError(f"way is 'arrive', and {why}: take 'gather'")
    # One rank has all rows and all heads, and by way of gather nothing is copied.
    way = way if local.world_size > 1 else "gather"
    if "dropout_p" in features and way != "all_to_all" and not local.has_sixteens:
        raise UnsupportedError(
            f"way is '{way}', with dropout, and rows of some ranks do not begin at multiples of 16 of the sequence's "
            f"{local.placement.seqlen}: take 'all_to_all', fewer ranks or a longer sequence"
        )
    _refuse_on_gpu(way, q, local, features)
    return way


def _shared_state(state, device, group):
    """A copy of a state, which may change before the backward, or one that rank 0 draws for all."""
    if state is not None:
        return state.detach().clone()
    state = draw_state(device)
    dist.broadcast(state, group=group, group_src=0)
    return state


def _arrive_or_gather(k, v, local, group):
    """ "arrive", or "gather" where nothing travels, or, with a warning, where ranks do not read each other's memory."""
    if not local.pieces:
        return "gather"
    try:
        exchange.of(group, k.device).reserve(WAYS["arrive"].slot_bytes(k, v, local))
    except exchange.Unreachable as why:
        warnings.warn(f"way is 'arrive', and 'gather' is taken: {why}", stacklevel=4)
        return "gather"
    return "arrive"


def _refuse_on_gpu(way, q, local, features):
    """UnsupportedError, on every rank and before anything travels, for what no kernel for GPUs takes."""
    over_positions = local.world_size > 1 and way != "all_to_all"
    if over_positions and features.keys() >= {"softcap", "alibi_slopes"} and not has_partial_results(q, features):
        raise UnsupportedError(
            f"way is '{way}', with softcap and alibi_slopes; kernels for GPUs do not take both over positions: "
            "take 'all_to_all'"
        )


# --- Checks -----------------------------------------------------------------------------------------


def _check_group(local, group):
    size, rank = messages.size_and_rank(group)
    if (size, rank) != (local.world_size, local.rank):
        raise ValueError(
            f"group has {size} ranks and this is rank {rank}; "
            f"local was made for rank {local.rank} of {local.world_size}"
        )


def _read_features(q, softcap, sink, alibi_slopes, dropout, dropout_state):
    """Options.given but the state; TypeError, ValueError or UnsupportedError if a feature is wrong, by shape too."""
    given = dict(softcap=softcap, sink=sink, alibi_slopes=alibi_slopes)
    ops.read_features(q.device, 0.0, dropout_state, split_size=0, **given)  # draws no state
    p = arguments.share("dropout", dropout)
    if dropout_state is not None and dropout_state.device != q.device:
        raise ValueError(f"dropout_state is on {dropout_state.device}; it must be on query's device, {q.device}")
    batch, heads = q.shape[0], q.shape[2]
    for name, x, shapes in (("sink", sink, [(heads,)]), ("alibi_slopes", alibi_slopes, [(heads,), (batch, heads)])):
        if x is not None and tuple(x.shape) not in shapes:
            raise ValueError(f"{name} is {list(x.shape)}; it must be {' or '.join(str(list(s)) for s in shapes)}")
    numbers = {"softcap": float(softcap), "dropout_p": float(p)}
    return {name: x for name, x in numbers.items() if x != 0}


def _read_timeout(seconds):
    seconds = arguments.number("arrival_timeout", seconds)
    if not 0 < seconds <= _MOST_TIMEOUT:
        raise ValueError(f"arrival_timeout is {seconds}; it must be above 0 and at most {_MOST_TIMEOUT:.0f} seconds")
    return seconds


def _check_agreement(q, k, v, sink, alibi_slopes, dropout_state, local, group, options):
    own = {
        "the mask or the placement": local.digest,
        "shapes of q, k and v": [(x.shape[0], *x.shape[2:]) for x in (q, k, v)],
        "dtypes": [str(x.dtype) for x in (q, k, v)],
        "options (way, softmax_scale, deterministic, return_lse, softcap, dropout)": options,
        "sink": _digest(sink),
        "alibi_slopes": _digest(alibi_slopes),
        "dropout_state": _digest(dropout_state),
    }
    every = [None] * local.world_size
    dist.all_gather_object(every, own, group)
    for what in own:
        others = [rank for rank, its in enumerate(every) if its[what] != every[0][what]]
        if others:
            given = "" if what.startswith("the mask") else f": {every[0][what]} and {every[others[0]][what]}"
            raise ValueError(f"ranks disagree: {what} of ranks {others} are not those of rank 0{given}")


def _digest(x):
    """Names a tensor's dtype, shape and contents."""
    if x is None:
        return None
    contents = hashlib.sha256(repr(x.tolist()).encode()).hexdigest()[:8]
    return f"{x.dtype} {list(x.shape)} of digest {contents}"
