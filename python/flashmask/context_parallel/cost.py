# SPDX-License-Identifier: Apache-2.0
"""A model of the time of one attention layer over several GPUs, to choose between gathering keys and an all-to-all.

gather: each rank computes its own rows, and keys and values that they see travel, while tiles of its own keys run. The
time is that of the busiest rank: its tiles, or its bytes and the last piece's tiles, whichever takes longer.
all_to_all: q, k and v change from rows of all heads to all rows of some heads, and back after the attention (Ulysses,
arXiv:2309.14509). Every rank computes the whole mask for its heads, so tiles are balanced, but nothing overlaps.

Inside of a node a byte takes the link's time. Of a group of several nodes all but the share of a rank's own node travel
over the network.
"""

from dataclasses import dataclass

_BYTES = 2  # of an element of q, k and v
_PARTIAL = 4  # of one of dk and dv, which are added in fp32


@dataclass(frozen=True)
class Machine:
    """What the model takes of GPUs and links.

    The rates are assumed for an H200 at head dim 128, bfloat16; the link's was measured between H200s of one host.
    """

    forward_flops: float = 600e12  # a GPU's attention, FLOP/s over live tiles
    backward_flops: float = 480e12
    link: float = 370e9  # bytes/s that a GPU takes in, inside of a node
    network: float = 45e9  # bytes/s that a GPU takes in from other nodes (400 Gb/s)
    gpus_per_node: int = 8
    latency: float = 12e-6  # seconds of a collective or a piece
    fixed_forward: float = 100e-6  # seconds of a call beyond kernels and bytes
    fixed_backward: float = 200e-6
    pieces: int = 4  # in which keys travel

    def bandwidth(self, ranks):
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
    def total(self):
        return self.forward + self.backward


def costs(*, tiles, tile_elements, received, rows, mask_heads, heads, head_dim, machine):
    """{"gather": Cost} and, where heads divide by the ranks, "all_to_all".

    tiles, received: of each rank, as Placement says them. tile_elements: rows x keys of a tile. rows: the most rows of
    a rank, over its batch entries. A mask head stands for heads_q / mask_heads heads.
    """
    ranks, (heads_q, heads_kv) = len(tiles), heads
    flops_of_tile = 4 * tile_elements * head_dim * heads_q / mask_heads
    result = {"gather": _gather(max(tiles) * flops_of_tile, max(received), heads_kv, head_dim, ranks, machine)}
    if heads_q % ranks == 0 and (heads_kv % ranks == 0 or ranks % heads_kv == 0):
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
    """The name of the faster, forward and backward together."""
    return min(costs, key=lambda name: costs[name].total)


def _gather(flops, keys, heads_kv, head_dim, ranks, machine):
    forward, backward = _compute(flops, machine)
    elements = keys * heads_kv * 2 * head_dim
    kv = _exchange(elements * _BYTES, ranks, machine)
    dkv = _exchange(elements * _PARTIAL, ranks, machine)

    def overlapped(compute, exchange):
        # The last piece's share of the tiles runs when all has arrived.
        return max(compute, exchange + compute / (machine.pieces + 1)) if exchange else compute

    # k and v arrive again, and partial dk and dv leave for their owners in the other direction.
    both = max(kv, dkv)
    return Cost(
        machine.fixed_forward + overlapped(forward, kv),
        machine.fixed_backward + overlapped(backward, both),
        forward,
        backward,
        kv,
        both,
    )


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


def _exchange(size, ranks, machine):
    return size / machine.bandwidth(ranks) + machine.latency * machine.pieces if size else 0.0


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
    if "all_to_all" not in costs:
        lines.append(f"  all_to_all is not possible: {ranks} ranks do not divide the heads")
    return "\n".join(lines)


def _ms(seconds):
    return f"{seconds * 1e3:.3f}"
