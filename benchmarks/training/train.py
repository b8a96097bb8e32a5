# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama on packed sequences of real text, and shows that skipping tiles changes no bit of it.

    python -m benchmarks.training prepare
    python -m benchmarks.training train --device cuda
    python -m benchmarks.training plot RECEIPT --svg docs/img/training.svg

`prepare` packs Python's own help texts with `flashmask run`, one file for each task; `train` trains on the files and
leaves a receipt and a chart. Without a step, both. Each task (sft, dpo, rm, tree) is trained three times from the same
weights on the same batches:

skipping          flashmask_attention, deterministic=True
dense             the same kernels under a dense mask, which skips nothing; deterministic
nondeterministic  flashmask_attention, deterministic=False, for comparison only

Of the first two the loss of every step and the weights after the last must be equal bit for bit, and at least half of
the 128 x 128 tiles of every batch must be empty; else the exit status is 1. The loss is the cross entropy of the file's
labels: bfloat16 autocast on CUDA, float32 on the CPU.

`prepare` needs the command: FLASHMASK_COMMAND, build/release/bin/flashmask, or flashmask on the path. The files can be
trained on elsewhere. Receipts go to benchmarks/results (or $OUT), those of the CPU to the folder of the files.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from flashmask.capi import library_path

from benchmarks import ROOT, charts, receipts
from benchmarks.instruments import kernels_used, timing
from benchmarks.training import packed_text
from benchmarks.training.llama import HEAD_DIM, Llama, dense, skipping

TASKS = list(packed_text.RECORDS)
# Option, default, what
NUMBERS = [
    ("steps", 100, "of each training"),
    ("seqlen", 4096, "tokens of a sequence"),
    ("sequences", 100, "to prepare for a task, about"),
    ("batch", 1, "sequences of a step"),
    ("layers", 4, "of the model"),
    ("dim", 384, f"its width, a multiple of {HEAD_DIM}"),
    ("heads-kv", 2, "key and value heads; must divide the query heads"),
    ("seed", 0, "of the weights"),
]
SETTINGS = ("device", "steps", "batch", "layers", "dim", "heads_kv", "seed")
ATTENTIONS = {
    "skipping": skipping(deterministic=True),
    "dense": dense,
    "nondeterministic": skipping(deterministic=False),
}
LEAST_EMPTY = 0.5
LEARNING_RATE, WARMUP_STEPS = 1e-3, 10
REPORT_EVERY = 10  # steps
SERIES = [
    ("skipping", "skipping", "#3b6fb6", "stroke-width:6;stroke-opacity:0.35"),
    ("dense", "dense mask", "#d1495b", "stroke-dasharray:7 5"),
    ("nondeterministic", "skipping, not deterministic", "#2a9d5c", "stroke-width:1"),
]


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", choices=["prepare", "train", "plot"], help="default: prepare, then train")
    parser.add_argument("receipt", nargs="?", type=Path, help="of plot")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "training", help="of the packed files (build/training)"
    )
    parser.add_argument("--svg", type=Path, help="the chart (training.svg in the folder)")
    parser.add_argument(
        "--tasks", type=lambda text: text.split(","), default=TASKS, help=f"some of {','.join(TASKS)} (all)"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    for name, default, what in NUMBERS:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    arguments = parser.parse_args(words)
    check(parser, arguments)
    return arguments


def check(parser, arguments):
    if unknown := set(arguments.tasks) - set(TASKS):
        parser.error(f"--tasks has {', '.join(sorted(unknown))}; it must be some of {', '.join(TASKS)}")
    if arguments.dim % (HEAD_DIM * arguments.heads_kv):
        parser.error(
            f"--dim is {arguments.dim}; it must be a multiple of "
            f"{HEAD_DIM} * --heads-kv, {HEAD_DIM * arguments.heads_kv}"
        )
    if arguments.steps < 2:
        parser.error(f"--steps is {arguments.steps}; it must be at least 2, or no step shows what the gradients did")
    if (arguments.step == "plot") != (arguments.receipt is not None):
        parser.error("plot, and only plot, takes a receipt")
    if arguments.step in (None, "train") and arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device is cuda, but torch.cuda.is_available() is false; "
            "--device cpu --steps 3 trains a little on the CPU"
        )


# --- prepare ----------------------------------------------------------------------------------------


def flashmask_command():
    built = ROOT / "build" / "release" / "bin" / "flashmask"
    command = os.environ.get("FLASHMASK_COMMAND") or (built if built.exists() else shutil.which("flashmask"))
    return command or sys.exit(
        "there is no flashmask command: build it, put it on the path, or name it in FLASHMASK_COMMAND"
    )


def prepare(arguments):
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for task in arguments.tasks:
        packed = packed_text.pack(task, arguments.folder, arguments.seqlen, arguments.sequences, flashmask_command())
        print(
            f"{packed}: {packed_text.load(packed)['input_ids'].shape[0]} sequences of {arguments.seqlen:,} tokens",
            flush=True,
        )


# --- train ------------------------------------------------------------------------------------------


@contextmanager
def repeatable():
    """Operations of torch that would add in any order refuse to, or take another way."""
    # Without it cuBLAS may choose anew; read at its first call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def train_once(arguments, batches, attention, report):
    """(loss of each step, weights after the last, seconds)."""
    torch.manual_seed(arguments.seed)
    model = Llama(arguments.layers, arguments.dim, arguments.heads_kv).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    losses, begin = [], time.monotonic()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS)
        losses.append(train_step(model, optimizer, batches[step % len(batches)], attention))
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == arguments.steps:
            report(step % REPORT_EVERY + 1, f"step {step + 1}, loss {losses[-1].item():.4f}")
    return torch.stack(losses).tolist(), [x.detach() for x in model.parameters()], time.monotonic() - begin


def train_step(model, optimizer, batch, attention):
    """The loss before the step; the host does not wait for it."""
    device = batch.input_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(batch.input_ids, batch.position_ids, attention(batch))
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def tiles_of(batches):
    """Tiles of 128 x 128 of all masks, the empty ones, and the least share of empty ones in a batch."""
    stats = [batch.mask.stats() for batch in batches]
    return {
        "all": sum(s.tiles for s in stats),
        "empty": sum(s.empty_tiles for s in stats),
        "least_empty_share": min(s.empty_tiles / s.tiles for s in stats),
    }


def train_task(arguments, task, progress):
    """The figures of a task: what was trained on, the losses and the times, and what was found equal."""
    batches = packed_text.batches(arguments.folder / f"{task}.safetensors", arguments.batch, arguments.device)
    figures = {
        "batches": len(batches),
        "seqlen": batches[0].input_ids.shape[1],
        "tiles": tiles_of(batches),
        "losses": {},
        "seconds": {},
    }
    weights = {}
    for name, attention in ATTENTIONS.items():
        report = lambda steps, text: progress.step(steps, f"{task}, {name}: {text}")  # noqa: E731
        with repeatable():
            figures["losses"][name], weights[name], seconds = train_once(arguments, batches, attention, report)
        figures["seconds"][name] = round(seconds, 2)
    figures["checks"] = checks(figures, weights)
    return figures


def checks(figures, weights):
    """{assertion: whether it holds}. Losses are finite, so equal numbers are equal bits, but for the sign of a zero."""
    losses = figures["losses"]
    return {
        "the losses of all steps have the same bits with and without skipping": losses["skipping"] == losses["dense"],
        "the trained weights have the same bits with and without skipping": all(
            map(torch.equal, weights["skipping"], weights["dense"])
        ),
        "in each batch at least half of the tiles are empty": figures["tiles"]["least_empty_share"] >= LEAST_EMPTY,
        "the loss falls": all(run[-1] < run[0] for run in losses.values()),
    }


def summary(task, figures):
    tiles, losses = figures["tiles"], figures["losses"]
    ends = ", ".join(
        f"{name} {run[0]:.4f} -> {run[-1]:.4f} in {figures['seconds'][name]:.1f} s" for name, run in losses.items()
    )
    yield (
        f"{task}: {figures['batches']} batches, {tiles['empty'] / tiles['all']:.1%} of the tiles empty, "
        f"in each at least {tiles['least_empty_share']:.1%}"
    )
    yield f"  loss {ends}"
    yield from (f"  {'ok' if holds else 'FAILED'}  {what}" for what, holds in figures["checks"].items())


def environment(device):
    return (
        timing.environment()
        if device == "cuda"
        else {"device": "CPU", "driver": "none", "toolkit": "none", "torch": torch.__version__}
    )


def kernel_hashes(arguments, library):
    """Hashes of the kernels of both directions, in both modes of the backward."""
    heads = arguments.dim // HEAD_DIM
    shapes = [(op, HEAD_DIM, arguments.seqlen, arguments.batch, heads, arguments.heads_kv) for op in ("fwd", "bwd")]
    return library.of_all([kernels_used.case_of(*shape) for shape in shapes], modes=(False, True))


def train(arguments, words):
    """Trains all tasks; True if all checks hold. The receipt grows with each task."""
    # For the dense mode.
    os.environ.setdefault("FLASHMASK_LIBRARY", str(library_path("FLASHMASK_LIBRARY", "libflashmask.so")))
    on_gpu = arguments.device == "cuda"
    receipt = receipts.new(
        "training", environment(arguments.device), shlex.join(["python", "-m", "benchmarks.training", *words])
    )
    receipt["kind"] = "gpu" if on_gpu else "cpu"
    if on_gpu:
        library = kernels_used.here()
        what = receipts.of_set(receipt["what"], library.arch)
        receipt.update(what=what, toolkit=library.toolkit, kernel_hashes=kernel_hashes(arguments, library))
    receipt["figures"] = {"settings": {name: getattr(arguments, name) for name in SETTINGS}, "tasks": {}}
    path = receipts.path_of(receipt, None if on_gpu else arguments.folder)
    progress = timing.Progress([arguments.steps * len(ATTENTIONS)] * len(arguments.tasks))
    for task in arguments.tasks:
        figures = train_task(arguments, task, progress)
        receipt["figures"]["tasks"][task] = figures
        for holds in figures["checks"].values():
            receipt["tests"]["passed" if holds else "failed"] += 1
        receipts.write(receipt, path)
        print("\n".join(summary(task, figures)), flush=True)
    receipt.update(complete=True, passed=receipt["tests"]["failed"] == 0)
    receipts.write(receipt, path)
    plot(receipt, arguments.svg or arguments.folder / "training.svg")
    print(f"{'PASS' if receipt['passed'] else 'FAIL'}  receipt {path.name}: {receipt['device']}")
    return receipt["passed"]


# --- plot -------------------------------------------------------------------------------------------


def plot(receipt, path):
    tasks, settings = receipt["figures"]["tasks"], receipt["figures"]["settings"]
    same = all(figures["losses"]["skipping"] == figures["losses"]["dense"] for figures in tasks.values())
    empty = {task: figures["tiles"]["empty"] / figures["tiles"]["all"] for task, figures in tasks.items()}
    panels = [(f"{task}: {empty[task]:.0%} of the tiles empty", figures["losses"]) for task, figures in tasks.items()]
    dtype = "bfloat16" if settings["device"] == "cuda" else "float32"
    svg = charts.line_panels(
        "Training under packed masks: the loss with and without skipping tiles",
        f"{receipt['device']}, {dtype}; {settings['layers']} layers of width {settings['dim']}, {settings['batch']} x "
        f"{next(iter(tasks.values()))['seqlen']:,} tokens a step",
        panels,
        SERIES,
        "step",
        "loss",
        f"Losses with and without skipping, bit for bit: {'the same in every step' if same else 'NOT THE SAME'}. "
        f"{receipt['date']}.",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, encoding="utf-8")
    print(f"{path}: written")


def main(words=None):
    words = sys.argv[1:] if words is None else words
    arguments = parse(words)
    if arguments.step == "plot":
        plot(
            json.loads(arguments.receipt.read_text(encoding="utf-8")),
            arguments.svg or arguments.receipt.with_suffix(".svg"),
        )
        return 0
    if arguments.step != "train":
        prepare(arguments)
    return 0 if arguments.step == "prepare" or train(arguments, words) else 1
