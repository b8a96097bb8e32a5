# SPDX-License-Identifier: Apache-2.0
"""A model of the time of one attention layer over several GPUs, to choose between the ways to compute it.

gather: each rank computes its own rows, in one call when the keys and values that they see have arrived. The time is
that of the busiest rank: its bytes, and then its tiles.
arrive: gather, whose forward begins before the keys are there: the tiles or the bytes, whichever takes longer. Among
GPUs of one node. It is not chosen: measured on two H200s, it was rarely faster than gather, and by little.
overlap: the same, but keys and values travel while tiles of its own keys run, and each part has partial results, which
are merged: the tiles, or the bytes and the last piece's tiles, whichever takes longer, and the merge. It pays where
links are slow: a partial result of a row, in fp32 for every query head, is more bytes than a key and its value.
all_to_all: q, k and v change from rows of all heads to all rows of some heads, and back after the attention (Ulysses,
arXiv:2309.14509). Every rank computes the whole mask for its heads, so tiles are balanced, but nothing overlaps.

Inside of a node a byte takes the link's time. Of a group of several nodes all but the share of a rank's own node travel
over the network.
"""

from dataclasses import dataclass

PIECES = 4  # pieces that keys travel in, so that tiles of one run while the next is on its way

_ASKED_FOR = ("arrive",)  # ways that are not chosen

_BYTES = 2  # bytes of an element of q, k and v
_PARTIAL = 4  # bytes of an element of dk and dv, which are added in fp32
# Bytes that an element of out, or of dq, of a part moves through a GPU's memory until it is merged: it is written,
# weighted and added in fp32.
_MERGED_OUT, _MERGED_DQ = 24, 16


@dataclass(frozen=True)
class Machine:
    """Machine of the model: GPUs and links.

    Rates are assumed for an H200 at head dim 128, bfloat16; the link's was measured between H200s of one host.
    """

    forward_flops: float = 600e12  # a GPU's attention, FLOP/s over live tiles
    backward_flops: float = 480e12
    link: float = 370e9  # bytes/s that a GPU takes in, inside of a node
    network: float = 45e9  # bytes/s that a GPU takes in from other nodes (400 Gb/s)
    gpus_per_node: int = 8
    memory: float = 4e12  # bytes/s of a GPU's own memory
    latency: float = 12e-6  # seconds of a collective or a piece
    fixed_forward: float = 100e-6  # seconds of a call beyond kernels and bytes
    fixed_backward: float = 200e-6
    pieces: int = PIECES  # pieces that keys travel in when they overlap with tiles

    def bandwidth(self, ranks: int) -> float:
        """Bytes/s that a rank takes in from the others of a group."""
        if ranks <= self.gpus_per_node:
            return self.link
        outside = (ranks - self.gpus_per_node) / (ranks - 1)
        return 1 / ((1 - outside) / self.link + outside / self.network)


@dataclass(frozen=True)
class Cost:
    """Seconds of one layer: tiles of the busiest rank, the busiest rank's bytes, and the whole."""

    forward: float
    backward: float
    compute_forward: float
    compute_backward: float
    exchange_forward: float
    exchange_backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def costs(*, tiles, tile_elements, received, rows, mask_heads, heads, head_dim, machine):
    """{"gather": Cost, "overlap": Cost}, inside of a node "arrive" and, where heads divide by the ranks, "all_to_all".

    tiles, received: of each rank, as Placement says them. tile_elements: rows x keys of a tile. rows: the most rows of
    a rank, over its batch entries. A mask head stands for heads_q / mask_heads heads.
    """
    ranks, (heads_q, heads_kv) = len(tiles), heads
    flops_of_tile = 4 * tile_elements * head_dim * heads_q / mask_heads
    flops = max(tiles) * flops_of_tile
    by_keys = _by_keys(flops, max(received), rows, heads, head_dim, ranks, machine)
    result = dict(zip(("gather", "arrive", "overlap"), by_keys))
    if ranks > machine.gpus_per_node:
        del result["arrive"]
    if divide(heads_q, heads_kv, ranks):
        result["all_to_all"] = _all_to_all(sum(tiles) / ranks * flops_of_tile, rows, heads, head_dim, ranks, machine)
    return result


def single(*, tiles, tile_elements, mask_heads, heads, head_dim, machine):
    """The Cost on one GPU."""
    return costs(
        tiles=[tiles],
        tile_elements=tile_elements,
        received=[0],
        rows=0,
        mask_heads=mask_heads,
        heads=heads,
        head_dim=head_dim,
        machine=machine,
    )["gather"]


def chosen(costs):
    """The name of the fastest that needs not be asked for, forward and backward together."""
    return min((name for name in costs if name not in _ASKED_FOR), key=lambda name: costs[name].total)


def keeps_keys(received, rows):
    """Decides if gather keeps received keys and values for its backward instead of receiving them again: if no rank
    receives more keys than `rows`, the rows of the largest shard. received: keys of each rank; both over batch entries.
    """
    return max(received) <= rows


def divide(heads_q, heads_kv, ranks):
    """Tells if ranks can share the heads evenly: as many query heads each, with whole heads of k and v for them."""
    return heads_q % ranks == 0 and (heads_kv % ranks == 0 or ranks % heads_kv == 0)


def _by_keys(flops, keys, rows, heads, head_dim, ranks, machine):
    """The Costs of gather, arrive and overlap."""
    forward, backward = _compute(flops, machine)
    heads_q, heads_kv = heads
    elements = keys * heads_kv * 2 * head_dim
    # Own keys and values are copied next to those that arrive, and their gradients come in fp32.
    copied = 2 * rows * heads_kv * 2 * head_dim / machine.memory if keys else 0.0

    def exchanges(pieces):
        """Seconds of keys and values, and of their gradients."""
        return [_exchange(elements * size, ranks, machine, pieces) for size in (_BYTES, _PARTIAL)]

    def cost(of_forward, of_backward, *exchange):
        """of_*: seconds of tiles, exchange and copies."""
        times = machine.fixed_forward + of_forward, machine.fixed_backward + of_backward
        return Cost(*times, forward, backward, *exchange)

    def overlapped(compute, exchange, merged):
        if not exchange:
            return compute
        # The last piece's share of the tiles runs when all has arrived.
        parts = machine.pieces + 1
        return max(compute, exchange + compute / parts) + parts * rows * heads_q * head_dim * merged / machine.memory

    kv, dkv = exchanges(1)
    again = 0.0 if keeps_keys([keys], rows) else kv
    copied_again = _PARTIAL * copied + (_BYTES * copied if again else 0.0)
    of_backward = backward + again + dkv + copied_again
    gather = cost(forward + kv + _BYTES * copied, of_backward, kv, again + dkv)
    in_pieces, of_gradients = exchanges(machine.pieces)
    arrive = cost(max(forward, in_pieces) + _BYTES * copied, of_backward, in_pieces, again + dkv)
    # k and v arrive again, and partial dk and dv leave for their owners in the other direction.
    merged = overlapped(backward, max(in_pieces, of_gradients), _MERGED_DQ)
    overlap = cost(overlapped(forward, in_pieces, _MERGED_OUT), merged, in_pieces, in_pieces + of_gradients)
    return gather, arrive, overlap


def _all_to_all(flops, rows, heads, head_dim, ranks, machine):
    forward, backward = _compute(flops, machine)
    heads_q, heads_kv = heads
    copies = max(ranks // heads_kv, 1)  # each rank has at least one head of k and v
    away = (ranks - 1) / ranks
    # As many elements arrive as leave: q, k, v and then out; dout and then dq, dk, dv.
    each = rows * head_dim * away
    there = _exchange(each * (heads_q + 2 * heads_kv * copies) * _BYTES, ranks, machine)
    back = _exchange(each * heads_q * _BYTES, ranks, machine)
    return Cost(
        machine.fixed_forward + forward + there + back,
        machine.fixed_backward + backward + there + back,
        forward,
        backward,
        there + back,
        there + back,
    )


def _compute(flops, machine):
    return flops / machine.forward_flops, 2.5 * flops / machine.backward_flops


def _exchange(size, ranks, machine, pieces=1):
    return size / machine.bandwidth(ranks) + machine.latency * pieces if size else 0.0


def described(costs, machine, ranks):
    """The table that Placement.explain prints."""
    name = chosen(costs)
    lines = [
        "predicted time of a layer in ms (a model, see Machine): forward = tiles, exchange | backward = tiles, exchange"
    ]
    for way, c in costs.items():
        lines.append(
            f"  {way:<10} {_ms(c.forward)} = {_ms(c.compute_forward)}, {_ms(c.exchange_forward)} | "
            f"{_ms(c.backward)} = {_ms(c.compute_backward)}, {_ms(c.exchange_backward)}"
            + ("  <- chosen" if way == name else "")
        )
    if "arrive" in costs:
        lines.append("  arrive is computed where it is asked for, by way='arrive'")
    if "all_to_all" not in costs:
        lines.append(f"  all_to_all is not possible: {ranks} ranks do not divide the heads")
    return "\n".join(lines)


def _ms(seconds):
    return f"{seconds * 1e3:.3f}"
