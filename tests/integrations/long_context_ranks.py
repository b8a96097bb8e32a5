# SPDX-License-Identifier: Apache-2.0
"""Program of each process of test_long_context.py, under torchrun: python long_context_ranks.py RECEIPT."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "long_context"))
import train
from documents import IGNORED, draw_batch

ARGUMENTS = ["--cp", "2", "--steps", "2", "--seqlen", "500", "--rows-at-once", "96", "--seed", "3"]


def whole(options, replicas):
    """Loss and gradients of one process that has all sequences, by transformers' own loss of whole logits."""
    model = train.make_model(options, torch.device("cpu")).model
    batches = [
        draw_batch(options.seqlen, options.vocab, options.seed + n, torch.device("cpu")) for n in range(replicas)
    ]
    count = sum((batch.labels[:, 1:] != IGNORED).sum() for batch in batches)
    loss = torch.zeros(())
    for batch in batches:
        inputs = dict(labels=batch.labels, position_ids=batch.positions, mask=batch.mask, use_cache=False)
        loss = loss + model(batch.ids, num_items_in_batch=count, **inputs).loss
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def shared(options, mesh):
    """Loss and gradients over all ranks of the mesh."""
    model = train.make_model(options, torch.device("cpu"))
    train.shard_model(model, mesh)
    seed = options.seed + mesh.get_local_rank("dp")
    loss = train.compute_loss(model, draw_batch(options.seqlen, options.vocab, seed, torch.device("cpu")), mesh)
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss, {name.removeprefix("model."): x.grad.full_tensor() for name, x in model.named_parameters()}


def main(receipt):
    torch.set_num_threads(1)
    options = train.read_options(ARGUMENTS, "cpu")
    mesh = train.make_mesh(options.cp, "cpu")
    got, want = shared(options, mesh), whole(options, mesh["dp"].size())
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    assert all(x.abs().max() > 0 for x in want[1].values())
    short = train.train(train.read_options([*ARGUMENTS, "--seconds", "1e-3"], "cpu"), mesh, lambda line: None)
    assert len(short["losses"]) == 1 and short["tokens_per_second"] is None, short
    train.make_mesh = lambda *_: mesh
    train.main([*ARGUMENTS, "--receipt", receipt])
    print(f"compared loss {got[0].item():.4f} and {len(got[1])} gradients")


if __name__ == "__main__":
    main(sys.argv[1])
