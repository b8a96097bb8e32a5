# SPDX-License-Identifier: Apache-2.0
"""What each process of test_processes.py runs; it says what went wrong in a file."""

import os
import sys
import traceback

import torch
import torch.distributed as dist
from flashmask import Mask, context_parallel, masks, ops
from torch.utils.checkpoint import checkpoint


def families():
    """Masks of 300 to 700 rows: {name: Mask}."""
    n = 421
    generator = torch.Generator().manual_seed(3)

    def bounds(vectors, batch=1, heads=1):
        return torch.randint(0, n + 1, (batch, heads, n, vectors), generator=generator, dtype=torch.int32)

    pos = torch.randint(0, n, (1, n), generator=generator, dtype=torch.int32)
    blocks = torch.rand(1, 2, 4, 4, generator=generator) < 0.6
    return {
        "full": Mask(n, n),
        "causal": Mask(n, n, causal=True),
        "window": Mask(n, n, window=(70, 20)),
        "causal window": Mask(n, n, causal=True, window=(50, -1)),
        "causal documents": masks.causal_document(seqlens=[100, 17, 204, 100]),
        "documents": masks.document(seqlens=[100, 17, 204, 100]),
        "shared question": masks.shared_question([(150, [60, 50]), (61, [40, 60])]),
        "prefix LM": masks.prefix_lm_causal(n, prefix=90),
        "any columns": Mask(n, n, bounds=bounds(4)),
        "per head": Mask(n, n, bounds=bounds(2, heads=2)),
        "batch": Mask(n, n, bounds=bounds(1, batch=2), causal=True),
        "causal interval in a window": Mask(n, n, bounds=bounds(2), causal=True, window=(200, -1)),
        "positions": Mask(n, n, q_pos=pos, k_pos=pos, causal=True),
        "blocks": Mask(n, n, block_mask=blocks, causal=True),
        "nothing": Mask(n, n, bounds=torch.zeros(1, 1, n, 1, dtype=torch.int32), causal=True),
    }


def tensors(mask, dtype=torch.float32, heads=(4, 2), dims=(32, 16), batch=2):
    generator = torch.Generator().manual_seed(mask.seqlen_q)
    (heads_q, heads_kv), (d, dv) = heads, dims
    shapes = ((heads_q, d), (heads_kv, d), (heads_kv, dv), (heads_q, dv))
    return [torch.randn(batch, mask.seqlen_q, *s, generator=generator).to(dtype) for s in shapes]


def whole(mask, q, k, v, dout):
    """out, lse and gradients on one process."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = ops.attention(*leaves, mask)
    return (out, lse, *torch.autograd.grad(_loss(out, lse, dout), leaves))


def _loss(out, lse, dout):
    return (out * dout).sum() + torch.where(lse == -torch.inf, 0, lse).sum()


def shared(placement, rank, mask_index, q, k, v, dout, way="auto"):
    """The same of this rank's rows."""
    local = placement.mask(rank, mask_index)
    leaves = [placement.shard(x, rank).requires_grad_() for x in (q, k, v)]
    out, lse = context_parallel.attention(*leaves, local, return_lse=True, way=way)
    return (out, lse, *torch.autograd.grad(_loss(out, lse, placement.shard(dout, rank)), leaves))


def ways(heads_q, heads_kv, world):
    """Those that these heads allow."""
    divide = heads_q % world == 0 and (heads_kv % world == 0 or world % heads_kv == 0)
    return ("gather", "overlap", "all_to_all") if divide else ("gather", "overlap")


def check(name, got, want, placement, rank, tolerance):
    for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want):
        y = placement.shard(y, rank, 2 if what == "lse" else 1)
        assert x.shape == y.shape and x.dtype == y.dtype, (name, what, x.shape, y.shape)
        if x.numel() == 0:
            continue
        error = (x.double() - y.double()).nan_to_num(0).abs().max().item()
        assert torch.equal(x.isinf(), y.isinf()) and not x.isnan().any(), (name, what)
        assert error <= tolerance * max(y.double().nan_to_num(0, 0, 0).abs().max().item(), 1), (name, what, error)


def test_families(rank, world):
    """Forward and gradients are those of one process, twice with the same bits, in each way."""
    for number, (name, mask) in enumerate(families().items()):
        scheme = ("balanced", "zigzag", "contiguous")[number % 3]
        placement = context_parallel.place(mask, world, scheme=scheme)
        heads = (4, 2) if world in (1, 2, 4) else (2 * world, 2)  # and 3 ranks cannot share 2 key heads
        inputs = tensors(mask, heads=heads)
        want = whole(mask, *inputs)
        for way in ways(*heads, world):
            got = shared(placement, rank, 0, *inputs, way=way)
            check(f"{name}, {way}", got, want, placement, rank, 2e-5)
            again = shared(placement, rank, 0, *inputs, way=way)
            assert all(torch.equal(x, y) for x, y in zip(got, again)), (name, way)


def test_lengths_and_heads(rank, world):
    for n, heads in ((1, (2, 2)), (world, (3, 1)), (129, (6, 3)), (1000, (2, 1))):
        for scheme in ("balanced", "zigzag", "contiguous"):
            mask = Mask(n, n, causal=True)
            placement = context_parallel.place(mask, world, scheme=scheme)
            inputs = tensors(mask, heads=heads, dims=(16, 24), batch=1)
            want = whole(mask, *inputs)
            for way in ("auto", *ways(*heads, world)):
                got = shared(placement, rank, 0, *inputs, way=way)
                check(f"{n} {scheme} {way}", got, want, placement, rank, 2e-5)


def test_half(rank, world):
    """Parts are not rounded in between: the errors are those of one process' rounding."""
    mask = masks.causal_document(seqlens=[200, 313])
    placement = context_parallel.place(mask, world)
    inputs = tensors(mask, torch.bfloat16, heads=(2 * world, world))
    want = whole(mask, *inputs)
    for way in ways(2 * world, world, world):
        got = shared(placement, rank, 0, *inputs, way=way)
        check(f"bfloat16 {way}", got, want, placement, rank, 1e-2)


def test_several_masks(rank, world):
    """Layers of different kinds on one placement."""
    both = [Mask(500, 500, causal=True), Mask(500, 500, causal=True, window=(60, -1))]
    placement = context_parallel.place(both, world)
    for index, mask in enumerate(both):
        inputs = tensors(mask)
        check(f"mask {index}", shared(placement, rank, index, *inputs), whole(mask, *inputs), placement, rank, 2e-5)


def test_only_what_is_seen_travels(rank, world):
    n = 128 * 2 * world
    documents = context_parallel.place(masks.causal_document(seqlens=[256] * world), world, scheme="contiguous")
    local = documents.mask(rank)
    assert local.received_keys == 0 and not local.pieces
    causal = context_parallel.place(Mask(n, n, causal=True), world, scheme="contiguous")
    assert causal.mask(rank).received_keys == 256 * rank
    assert causal.mask(rank).received_keys == causal.received_rows()[rank]


def test_no_part_is_used_before_it_arrives(rank, world):
    """Gradients reach every rank's keys when only one rank's output is used."""
    mask = Mask(300, 300)
    placement = context_parallel.place(mask, world, scheme="contiguous")
    q, k, v, dout = tensors(mask)
    dout = torch.where(torch.arange(300)[None, :, None, None] >= placement.segments(world - 1)[0][0], dout, 0)
    leaves = [placement.shard(x, rank).requires_grad_() for x in (q, k, v)]
    full = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad((ops.attention(*full, mask)[0] * dout).sum(), full)
    for way in ways(q.shape[2], k.shape[2], world):
        out = context_parallel.attention(*leaves, placement.mask(rank), way=way)
        got = torch.autograd.grad((out * placement.shard(dout, rank)).sum(), leaves)
        for x, y in zip(got, want):
            assert (x - placement.shard(y, rank)).abs().max() < 2e-5, way


def test_checkpointing(rank, world):
    """A layer that is computed again in the backward, and one in a compiled function: the same bits."""
    mask = masks.causal_document(seqlens=[150, 251])
    placement = context_parallel.place(mask, world)
    local = placement.mask(rank)
    heads = (2 * world, world)
    shards = [placement.shard(x, rank) for x in tensors(mask, heads=heads)]

    def gradients(way, wrap):
        leaves = [x.clone().requires_grad_() for x in shards[:3]]
        out = wrap(lambda q, k, v: context_parallel.attention(q * 2, k, v, local, way=way), *leaves)
        return torch.autograd.grad((out * shards[3]).sum(), leaves)

    for way in ways(*heads, world):
        want = gradients(way, lambda call, *leaves: call(*leaves))
        got = gradients(way, lambda call, *leaves: checkpoint(call, *leaves, use_reentrant=False))
        compiled = gradients(way, lambda call, *leaves: torch.compile(call, backend="eager")(*leaves))
        assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(want, got, compiled)), way


def test_layouts(rank, world):
    """Views with other strides, as of [batch, heads, rows, head_dim], and no gradient wanted of some."""
    mask = Mask(300, 300, causal=True)
    placement = context_parallel.place(mask, world)
    local = placement.mask(rank)
    q, k, v, dout = (placement.shard(x, rank) for x in tensors(mask))
    want = context_parallel.attention(q, k, v, local)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    v.requires_grad_()
    got = context_parallel.attention(q, k, v, local)
    assert torch.equal(got, want)
    (dv,) = torch.autograd.grad((got * dout).sum(), [v])
    assert dv.shape == v.shape and dv.isfinite().all()


def test_disagreements(rank, world):
    def message_of(call):
        try:
            call()
        except ValueError as error:
            return str(error)
        raise AssertionError("nothing was raised")

    if world == 1:
        return
    masks_ = [Mask(300, 300, causal=True), Mask(300, 300)]
    mine = context_parallel.place(masks_[rank == 1], world, scheme="contiguous")
    q, k, v, _ = (mine.shard(x, rank) for x in tensors(masks_[0]))
    text = message_of(lambda: context_parallel.attention(q, k, v, mine.mask(rank), check=True))
    assert "the mask or the placement of ranks [1] " in text, text
    same = context_parallel.place(masks_[0], world, scheme="contiguous").mask(rank)
    q, k, v = (x[:1] if rank == 1 else x for x in (q, k, v))
    text = message_of(lambda: context_parallel.attention(q, k, v, same, check=True))
    assert "shapes of q, k and v of ranks [1]" in text and "(1, " in text, text
    other = context_parallel.place(masks_[0], world).mask((rank + 1) % world)
    text = message_of(lambda: context_parallel.attention(q, k, v, other))
    assert f"this is rank {rank}" in text, text


TESTS = {name: value for name, value in globals().items() if name.startswith("test_")}


def run(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for name, test in TESTS.items():
        error = ""
        try:
            test(rank, world)
        except Exception:
            error = traceback.format_exc()
        with open(os.path.join(folder, f"{name}.{rank}"), "w") as file:
            file.write(error)
        if error:  # the others may wait for this rank
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
