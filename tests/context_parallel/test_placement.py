# SPDX-License-Identifier: Apache-2.0
"""Placements against dense masks: whose rows are whose, what a rank's rows see, loads, and tensors taken apart."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from flashmask import Mask, masks
from flashmask.context_parallel import Machine, place

SCHEMES = ("contiguous", "zigzag", "balanced")


def cases():
    generator = torch.Generator().manual_seed(1)
    bounds = torch.randint(0, 701, (2, 3, 700, 4), generator=generator, dtype=torch.int32)
    bounds = bounds.sort(dim=-1).values
    blocks = torch.rand(1, 2, 8, 8, generator=generator) < 0.4
    positions = torch.randint(0, 300, (2, 640), generator=generator, dtype=torch.int32)
    return {
        "causal_document": masks.causal_document(seqlens=[100, 700, 3, 400, 77]),
        "document": masks.document(seqlens=[129, 1000, 151, 256]),
        "prefix_lm_document": masks.prefix_lm_document(seqlens=[900, 300, 337], prefix=[200, 1, 337]),
        "window": masks.sliding_window(1000, 1000, left=37),
        "full": Mask(515, 515),
        "short": masks.causal(5, 5),
        "one": Mask(1, 1),
        "random": Mask(700, 700, bounds=bounds),
        "random_band": Mask(700, 700, bounds=bounds[..., :2].contiguous(), causal=True, window=(50, 0)),
        "blocks": Mask(1000, 1000, block_mask=blocks, causal=True),
        "positions": Mask(640, 640, causal=True, window=(90, 0), q_pos=positions, k_pos=positions),
        "nothing": Mask(300, 300, bounds=torch.zeros(1, 1, 300, 1, dtype=torch.int32), causal=True),
    }


CASES = cases()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CASES)
def test_rows_loads_and_keys(name, scheme, ranks):
    mask = CASES[name]
    placement = place(mask, ranks, scheme=scheme)
    index = [placement.index(rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(index).sort().values, torch.arange(mask.seqlen_q))
    assert all(torch.equal(i, i.sort().values) for i in index)
    units = [len(torch.unique(i // placement.unit)) for i in index]
    assert max(units) - min(units) <= 1
    for rank in range(ranks):
        assert placement.segments(rank) == sorted(placement.segments(rank))
        assert all(begin % placement.unit == 0 for begin, _ in placement.segments(rank))

    visible = mask.to_dense()
    seen = [visible[:, :, i].any(dim=(1, 2)) for i in index]  # [batch, keys]
    for i, s in zip(index, seen):
        s[:, i] = False
    least = [int(s.sum()) for s in seen]
    exact = mask.block_mask is None and mask.q_pos is None
    got = placement.received_rows()
    assert got == least if exact else all(a >= b for a, b in zip(got, least))

    side = min(placement.unit, 128)
    rows, keys = (-(-mask.seqlen_q // n) for n in (placement.unit, side))
    padded = torch.zeros(*visible.shape[:2], rows * placement.unit, keys * side, dtype=torch.bool)
    padded[:, :, : mask.seqlen_q, : mask.seqlen_k] = visible
    live = padded.view(*visible.shape[:2], rows, placement.unit, keys, side).any(dim=5).any(dim=3)
    of_unit = live.sum(dim=(0, 1, 3))
    loads = [int(of_unit[torch.unique(i // placement.unit)].sum()) for i in index]
    assert placement.loads() == loads if mask.q_pos is None else all(a >= b for a, b in zip(placement.loads(), loads))


def test_balanced_keeps_to_its_slack_and_beats_the_others():
    mask = masks.causal_document(seqlens=[3000, 900, 5000, 100, 1192, 2048, 4144])
    by_scheme = {scheme: place(mask, 4, scheme=scheme) for scheme in SCHEMES}
    assert by_scheme["balanced"].imbalance() <= 1.02
    assert min(by_scheme[s].imbalance() for s in SCHEMES[:2]) > 1.1


def test_documents_stay_together_where_they_can():
    placement = place(masks.document(seqlens=[1024] * 16), 4)
    assert placement.imbalance() == 1
    assert placement.received_rows() == [0, 0, 0, 0]


def test_one_placement_balances_several_masks():
    several = [
        masks.causal(8192, 8192),
        masks.sliding_window(8192, 8192, left=511),
        masks.causal_document(seqlens=[5000, 3192]),
    ]
    placement = place(several, 4)
    assert all(placement.imbalance(n) <= 1.021 for n in range(3))
    assert placement.imbalance(1) == place(several[1], 4).imbalance() or placement.received_rows(1) != [0] * 4


def test_equal_arguments_give_equal_placements():
    mask = masks.causal_document(seqlens=[3000, 900, 5000, 100, 1192])
    first, second = place(mask, 4), place(mask.replace(), 4)
    assert first.digest == second.digest
    assert first.digest != place(mask, 4, scheme="zigzag").digest


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["causal_document", "short", "window"])
def test_join_undoes_shard(name, dim):
    placement = place(CASES[name], 3)
    shape = [2, 3, 4]
    shape[dim] = placement.seqlen
    x = torch.randn(shape, requires_grad=True)
    shards = [placement.shard(x, rank, dim) for rank in range(3)]
    assert torch.equal(placement.join(shards, dim), x)
    shards[1].sum().backward()
    expected = torch.zeros(shape).transpose(dim, 0)
    expected[placement.index(1)] = 1
    assert torch.equal(x.grad.transpose(dim, 0), expected)


def test_explain_names_loads_and_the_chosen_way():
    placement = place(masks.causal_document(seqlens=[30000, 2768]), 4, heads=(64, 8), head_dim=128)
    text = placement.explain()
    assert (
        "<- chosen" in text
        and all(way in text for way in ("gather", "arrive", "overlap", "all_to_all"))
        and f"{placement.loads()[3]}" in text
    )
    assert "not possible" in place(masks.causal(4096, 4096), 3, heads=(64, 8), head_dim=128).explain()
    assert "needs" not in text and "need heads" in place(masks.causal(4096, 4096), 2).explain()


def test_the_model_prefers_what_moves_less():
    # A window moves a few keys of eight heads; a full mask with few heads moves what an all-to-all moves many times.
    window = place(masks.sliding_window(131072, 131072, left=1023), 8, heads=(64, 8), head_dim=128).costs()
    assert window["gather"].total < window["all_to_all"].total
    # Merging costs more than links inside of a node, and less than slow ones.
    causal = place(masks.causal(131072, 131072), 8, heads=(64, 8), head_dim=128)
    assert causal.costs()["gather"].total < causal.costs()["overlap"].total
    assert causal.way(machine=Machine(link=10e9)) == "overlap"
    # Keys that arrive hide behind tiles, and are not chosen: they have to be asked for, inside of a node.
    hidden = causal.costs()["gather"].forward - causal.costs()["arrive"].forward
    assert hidden == pytest.approx(causal.costs()["gather"].exchange_forward)
    assert causal.costs()["arrive"].backward == causal.costs()["gather"].backward
    documents = place(masks.causal_document(seqlens=[30000, 2768]), 2, heads=(64, 8), head_dim=128)
    fastest = min(documents.costs().items(), key=lambda item: item[1].total)
    assert (fastest[0], documents.way()) == ("arrive", "gather")
    assert "arrive" not in causal.costs(machine=Machine(gpus_per_node=4))
    slow = Machine(link=1e9)
    full = place(Mask(16384, 16384), 8, heads=(8, 8), head_dim=128).costs(machine=slow)
    assert full["all_to_all"].total < full["gather"].total


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(mask=[]), ValueError, "empty list"),
        (dict(mask=torch.zeros(2)), TypeError, "mask is"),
        (dict(mask=Mask(4, 5)), ValueError, "4 query rows and 5 keys"),
        (dict(mask=[Mask(4, 4), Mask(5, 5)]), ValueError, "mask 1 has 5"),
        (dict(world_size=0), ValueError, "world_size is 0"),
        (dict(scheme="ring"), ValueError, "scheme is 'ring'"),
        (dict(heads=(6, 4)), ValueError, "heads_kv must divide"),
        (dict(head_dim=0), ValueError, "head_dim is 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        place(**{"mask": Mask(8, 8), "world_size": 2, **arguments})


def test_wrong_tensors_are_named():
    placement = place(Mask(300, 300), 2)
    with pytest.raises(ValueError, match="must be the sequence, 300"):
        placement.shard(torch.zeros(1, 299), 0)
    with pytest.raises(ValueError, match="rank is 2"):
        placement.shard(torch.zeros(1, 300), 2)
    with pytest.raises(ValueError, match="need|None"):
        placement.received_bytes()


def _unshard(rank, ranks, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    placement = place(masks.causal_document(seqlens=[500, 211, 300]), ranks)
    whole = torch.arange(2 * 1011 * 3, dtype=torch.float64).view(2, 1011, 3)
    local = placement.shard(whole, rank).requires_grad_()
    joined = placement.unshard(local)
    assert torch.equal(joined, whole)
    (joined * whole * (rank + 1)).sum().backward()  # all ranks' losses count
    assert torch.equal(local.grad, placement.shard(whole, rank) * sum(range(1, ranks + 1)))
    ids = torch.arange(1011)
    assert torch.equal(placement.unshard(placement.shard(ids, rank, 0), dim=0), ids)
    with pytest.raises(ValueError, match="rows"):
        placement.unshard(local[:, 1:])
    dist.destroy_process_group()


def test_unshard_over_gloo(tmp_path):
    mp.spawn(_unshard, (3, tmp_path / "meeting"), nprocs=3)
