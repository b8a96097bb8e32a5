# SPDX-License-Identifier: Apache-2.0
"""Models over two processes, each with its own rows, against one process with the whole sequences."""

import pytest
import small_models
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from flashmask import Mask, masks
from flashmask.context_parallel import place
from flashmask.integrations.transformers import ContextParallel, register

LENGTHS = [90, 131, 79]  # of packed documents
KINDS = ["sliding_attention", "full_attention"]  # gpt-oss with its sinks, and Gemma 2 with its softcap


def masks_of(name):
    """The masks of a model's kinds of layers, and the kinds."""
    documents = masks.causal_document(seqlens=LENGTHS)
    if name == "llama":
        return [documents], None
    return [documents.replace(window=(small_models.WINDOW - 1, -1)), documents], KINDS


def batch():
    """Ids, labels and positions: two sequences of the same documents, whose first tokens nothing predicts."""
    torch.manual_seed(1)
    ids = torch.randint(3, 255, (2, sum(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return ids, ids.masked_fill(positions == 0, -100), positions


def run(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    ids, labels, positions = batch()
    for name in ("llama", "gpt_oss", "gemma2"):
        torch.manual_seed(0)
        model = small_models.MODELS[name](attn_implementation=register()).train()
        whole, kinds = masks_of(name)
        mask = whole[0] if kinds is None else dict(zip(kinds, whole))
        parallel = ContextParallel(place(whole, 2, scheme="zigzag"), layer_types=kinds)
        parameters = [x for x in model.parameters() if x.requires_grad]
        for dropout in (0.0, 0.3):
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = dropout
            torch.manual_seed(2)
            model.activation_checkpointing_disable()
            loss = model(ids, labels=labels, position_ids=positions, mask=mask, use_cache=False).loss
            want = loss.detach(), torch.autograd.grad(loss, parameters, allow_unused=True)

            torch.manual_seed(2 + rank)  # rank 0 draws the states
            model.activation_checkpointing_enable()
            share = model(**parallel.inputs(ids, labels, positions)).loss
            got = share.detach(), torch.autograd.grad(share, parameters, allow_unused=True)
            for x in (got[0], *filter(lambda x: x is not None, got[1])):
                dist.all_reduce(x)
            torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    check_errors(parallel, ids)
    dist.destroy_process_group()


def check_errors(parallel, ids):
    placement = parallel.placement
    with pytest.raises(ValueError, match="layer_types is None and the placement has 2 masks"):
        ContextParallel(placement)
    with pytest.raises(ValueError, match="group has 2 ranks; the placement is for 3"):
        ContextParallel(place(placement.masks[0], 3))
    with pytest.raises(TypeError, match="placement is a Mask"):
        ContextParallel(Mask(8, 8))
    with pytest.raises(ValueError, match="must be the sequence, 300"):
        parallel.inputs(ids[:, 1:])
    inputs = parallel.inputs(ids)
    assert "labels" not in inputs
    assert torch.equal(inputs["position_ids"][0], placement.index(parallel.rank))


def test_models(tmp_path):
    mp.spawn(run, (tmp_path / "meeting",), nprocs=2)
