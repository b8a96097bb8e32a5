# SPDX-License-Identifier: Apache-2.0
"""Training on sequences too long for one GPU: FSDP2 x context parallelism over a 2-D device mesh.

    torchrun --nproc-per-node 8 examples/long_context/train.py --cp 4 --seqlen 131072 --receipt speed.json
    torchrun --nproc-per-node 2 examples/long_context/train.py --seqlen 262144 --seconds 240 --receipt speed.json
    torchrun --nproc-per-node 4 examples/long_context/train.py --cp 2    # without GPUs: a tiny model over gloo

Ranks of one row of the mesh share a sequence of packed documents, each rank with its own rows of it; rows have other
sequences (data parallelism). Parameters are sharded over all ranks. The model is transformers' own Llama, unchanged:
its registered attention finds the rank's mask in the arguments of the call. Activations are checkpointed layer by
layer, and logits exist for a few rows at a time. Loss and gradients are those of one process with all sequences. Model
and documents are made up, so nothing is downloaded.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from documents import IGNORED, Batch, draw_batch
from flashmask.context_parallel import place
from flashmask.integrations.transformers import ContextParallel, register
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

# Sizes by default: the layers of Llama 3.2 1B on GPUs, and small ones for CPUs.
SIZES = {
    "cuda": dict(seqlen=131072, layers=16, hidden=2048, heads=32, kv_heads=8, vocab=32768),
    "cpu": dict(seqlen=1024, layers=2, hidden=64, heads=4, kv_heads=2, vocab=256),
}


class LossModel(torch.nn.Module):
    """A causal model whose result is its loss, from some rows' logits at a time. It is FSDP's root, so that the output
    projection is whole while it runs."""

    def __init__(self, model: LlamaForCausalLM, rows_at_once: int) -> None:
        super().__init__()
        self.model, self.rows_at_once = model, rows_at_once

    def forward(self, shift_labels: torch.Tensor, num_items_in_batch: torch.Tensor, **inputs: Any) -> torch.Tensor:
        hidden = self.model.model(**inputs).last_hidden_state.flatten(0, 1)
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows, targets in zip(hidden.split(self.rows_at_once), shift_labels.flatten().split(self.rows_at_once)):
            total = total + checkpoint(_loss_sum, rows, self.model.lm_head.weight, targets, use_reentrant=False)
        return total / num_items_in_batch


def _loss_sum(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ weight.T).float()
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def make_model(options: argparse.Namespace, device: torch.device) -> LossModel:
    """A random model, the same on every rank."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=options.vocab,
        max_position_embeddings=options.seqlen,
        attn_implementation=register(),
    )
    with device:
        model = LlamaForCausalLM(config)
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return LossModel(model, options.rows_at_once).train()


def shard_model(model: LossModel, mesh: DeviceMesh) -> None:
    """Shards the parameters over all ranks; gradients are summed, as each rank's loss is its share."""
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    on_gpu = mesh.device_type == "cuda"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    for part in (*model.model.model.layers, model):
        fully_shard(part, mesh=everyone, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other one with a factor


def compute_loss(model: LossModel, batch: Batch, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's share of the mean loss over the sequences of all ranks."""
    placement = place(batch.mask, mesh["cp"].size())
    inputs = ContextParallel(placement, mesh["cp"].get_group()).inputs(batch.ids, batch.labels, batch.positions)
    dist.all_reduce(inputs["num_items_in_batch"], group=mesh["dp"].get_group())  # of all rows of the mesh
    return model(**inputs)


def train(options: argparse.Namespace, mesh: DeviceMesh, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains for some steps, or as many as the seconds have room for; returns what the receipt says."""
    end = time.perf_counter() + (options.seconds or math.inf)
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    replicas, ranks = mesh["dp"].size(), mesh["cp"].size()
    tokens = replicas * options.seqlen  # of a step
    model = make_model(options, device)
    parameters = sum(x.numel() for x in model.parameters())
    say(f"{parameters / 1e6:,.1f} M parameters, {replicas} sequences of {options.seqlen} tokens on {ranks} ranks each")
    shard_model(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[float] = []
    seconds = 0.0
    for step in range(options.steps):
        before = time.perf_counter()
        seed = options.seed + step * replicas + mesh.get_local_rank("dp")
        loss = compute_loss(model, draw_batch(options.seqlen, options.vocab, seed, device), mesh)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_sum_over_ranks(loss.detach()))  # waits for the step
        now = time.perf_counter()
        if step > 0:
            seconds += now - before  # the first step also makes what is made once
        say(_progress(step + 1, options.steps, seconds, tokens, losses[-1]))
        # All ranks stop when one has no time for another step.
        if _sum_over_ranks(torch.tensor(float(now + (now - before) > end), device=device)):
            break
    return {
        **vars(options),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "dp": replicas,
        "cp": ranks,
        "parameters": parameters,
        "losses": losses,
        "tokens_per_second": _rate(len(losses), seconds, tokens),
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,  # of rank 0
    }


def _sum_over_ranks(x: torch.Tensor) -> float:
    dist.all_reduce(x)
    return x.item()


def _rate(steps: int, seconds: float, tokens: int) -> float | None:
    """Tokens per second of the steps after the first, which took `seconds`; None if there are none."""
    return (steps - 1) * tokens / seconds if steps > 1 else None


def _progress(done: int, steps: int, seconds: float, tokens: int, loss: float) -> str:
    line = f"{100 * done // steps:3d} %  step {done}/{steps}  loss {loss:.4f}"
    rate = _rate(done, seconds, tokens)
    if rate is None:
        return line
    left = round((steps - done) * tokens / rate)
    return f"{line}  {rate:,.0f} tokens/s  ETA {left // 60}:{left % 60:02d}"


def read_options(arguments: Sequence[str] | None, device_type: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=0, help="ranks that share a sequence; default: all")
    for name, value in SIZES[device_type].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=20, help="at least 1; the first does not count for the speed")
    parser.add_argument("--seconds", type=float, help="time for the steps: none begins that would end later")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows-at-once", type=int, default=2048, help="rows whose logits exist at a time")
    parser.add_argument("--receipt", help="file to write tokens per second to, as JSON")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds is {options.seconds}; it must be above 0")
    return options


def make_mesh(cp: int, device_type: str) -> DeviceMesh:
    """dp x cp, ranks that share a sequence next to each other."""
    world = int(os.environ["WORLD_SIZE"])
    cp = cp or world
    if world % cp:
        raise SystemExit(f"--cp is {cp}; it must divide the number of ranks, {world}")
    return init_device_mesh(device_type, (world // cp, cp), mesh_dim_names=("dp", "cp"))


def main(arguments: Sequence[str] | None = None) -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    options = read_options(arguments, device_type)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = make_mesh(options.cp, device_type)
    is_first = dist.get_rank() == 0
    receipt = train(options, mesh, lambda line: print(line, flush=True) if is_first else None)
    if options.receipt and is_first:
        with open(options.receipt, "w", encoding="utf-8") as file:
            json.dump(receipt, file, indent=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
