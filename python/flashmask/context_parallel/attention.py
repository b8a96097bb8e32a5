# SPDX-License-Identifier: Apache-2.0
"""Attention of a sequence whose rows are spread over the ranks of a process group."""

from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from .._core import arguments, call_options
from .._core.annotations import Backend
from ..torch import ops
from . import cost, messages
from .by_heads import AllToAll
from .by_keys import Gather, Options, Overlap
from .local_mask import LocalMask

Way: TypeAlias = Literal["auto", "gather", "overlap", "all_to_all"]
WAYS: dict[str, Any] = {"gather": Gather, "overlap": Overlap, "all_to_all": AllToAll}


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
    return_lse: bool = False,
    check: bool | None = None,
    **features: Any,
) -> Any:
    """Masked attention of this rank's rows over all keys that they see: out, differentiable in q, k and v.

    All ranks of the group call it, and later its backward. Tensors travel through torch.distributed, and gradients of
    keys and values that travelled are summed in float32, in a fixed order.

    Args:
        q: [batch, rows, heads_q, head_dim]; k, v: [batch, rows, heads_kv, head_dim or head_dim_v]: this rank's rows, as
            placement.shard(x, rank) returns them.
        local: the LocalMask of this rank, placement.mask(rank), on the tensors' device.
        group: the process group, its ranks in the placement's order; None: the default one.
        way: "gather": the keys and values that the rank's rows see travel to it, and one call runs when they have
            arrived; "overlap": they travel in pieces while tiles of the keys at hand run, and partial results are
            merged in float32; "all_to_all": q, k and v change from rows to heads, and out back (for numbers of heads
            that the ranks can share). "auto": the cost model's choice, see Placement.explain.
        softmax_scale, deterministic, backend, max_ctas: as in flashmask_attention. With max_ctas multiprocessors are
            left to communication.
        return_lse: also return lse, [batch, heads_q, rows].
        check: compare the mask, the placement, shapes and options of all ranks first. None: only if torch.distributed's
            debug level is not OFF (TORCH_DISTRIBUTED_DEBUG).
        features: those of flashmask_attention are not implemented; anything but their defaults is refused.

    Raises:
        TypeError, ValueError: an argument is wrong, or, with check, ranks disagree; the message names them.
        UnsupportedError: no backend takes the call, or a feature is asked for that is not implemented.
    """
    call_options.refuse_features(
        features,
        "context parallelism does not implement it (dropout would count the rows and keys of each rank from 0)",
    )
    if not isinstance(local, LocalMask):
        raise TypeError(f"local is a {type(local).__name__}; it must be a LocalMask, as placement.mask(rank) makes it")
    ops.check_dimensions(q, k, v, "bshd")
    arguments.choice("way", way, ("auto", *WAYS))
    softmax_scale, deterministic, max_ctas = ops.read_options(softmax_scale, deterministic, backend, max_ctas)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    _check_group(local, group)
    if dist.get_debug_level() != dist.DebugLevel.OFF if check is None else check:
        _check_agreement(q, k, v, local, group, (way, softmax_scale, deterministic, return_lse))
    ops.check_lengths(local.own, q, k, "bshd")
    q, k, v = ops.autocast(q, k, v)
    function = WAYS[_way(way, q, k, local)]
    options = Options(ops.KernelOptions(softmax_scale, deterministic, backend, max_ctas), bool(return_lse))
    out, lse = function.apply(q, k, v, local, group, options)
    return (out, lse) if return_lse else out


def _way(way, q, k, local):
    heads = q.shape[2], k.shape[2]
    if way == "auto":
        return local.way(heads, q.shape[3])
    if way == "all_to_all" and not cost.divide(*heads, local.world_size):
        raise ValueError(
            f"way is 'all_to_all'; {local.world_size} ranks cannot share {heads[0]} query and {heads[1]} key heads: "
            f"heads_q must be a multiple of the ranks, and one of heads_kv and ranks a multiple of the other"
        )
    # One rank has all rows and all heads, and by way of gather nothing is copied.
    return way if local.world_size > 1 else "gather"


# --- Checks -----------------------------------------------------------------------------------------


def _check_group(local, group):
    size, rank = messages.size_and_rank(group)
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
        "options (way, softmax_scale, deterministic, return_lse)": options,
    }
    every = [None] * local.world_size
    dist.all_gather_object(every, own, group)
    for what in own:
        others = [rank for rank, its in enumerate(every) if its[what] != every[0][what]]
        if others:
            given = "" if what.startswith("the mask") else f": {every[0][what]} and {every[others[0]][what]}"
            raise ValueError(f"ranks disagree: {what} of ranks {others} are not those of rank 0{given}")
