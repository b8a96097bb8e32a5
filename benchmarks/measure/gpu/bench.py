# SPDX-License-Identifier: Apache-2.0
"""Measurements on a GPU, forward unless said otherwise, each with a receipt in benchmarks/results (or in $OUT).

FLASHMASK_LIBRARY names the library, FLASHMASK_KERNELS the kernel set (sm90, sm80, sm86; default: the device's).

    export FLASHMASK_LIBRARY=build/gpu/src/libflashmask.so PYTHONPATH=python
    python -m benchmarks.measure.gpu.bench paper --head-dim 128 --seqlen 8192

paper     twelve masks, five of them with grouped heads too, against FlashMask V3, FlashAttention-3, FlexAttention,
          cuDNN, a dense mask and materialised attention. With --op bwd the backward, fast and deterministic, against
          the first four. The kernels of mma.sync against FlashAttention-2, FlexAttention and SDPA with a dense mask
sparsity  latency against sparsity at 32K
small     wall time of 1,000 calls on a small problem; with --op bwd of forward and backward
blocks    random block masks, forward and backward
padding   what head dims between two instances cost
features  what sinks, softcap and dropout cost, forward and backward
maskcost  the element mask's price: all tiles partial against all tiles full
plan      the planner's time
masks     the time of building a mask's vectors, family by family
cycles    cycles of the kernels; with --old LIBRARY of two libraries that take turns
decode    decode over KV caches, against FlashAttention-3, FlashInfer and XQA, and a stream that only reads; needs the
          PyTorch package (FLASHMASK_TORCH_LIBRARY)
prefill   chunks of rows, drafts and images over KV caches, against our contiguous forward, FlashAttention-3,
          FlashInfer, XQA, FlexAttention and vLLM's Triton kernel; likewise
forests   decode of requests that begin with the same pages, against the plain call and FlashInfer's levels; likewise
lists     masks of interval lists against FlexAttention, their partial tiles and their plans; likewise
serving   transformers' continuous batching by our attention and by its own; likewise, with transformers
first     time from ready inputs to the first output, in a fresh process
"""

import argparse
import importlib
import os
import shlex
import sys

from benchmarks import receipts
from benchmarks.instruments import kernels_used

COMMANDS = {  # and the modules beside this one that have them
    "paper": "paper",
    "sparsity": "sparsity",
    "small": "small_problems",
    "features": "feature_cost",
    "blocks": "random_blocks",
    "padding": "padded_head_dims",
    "maskcost": "element_mask_cost",
    "plan": "plan_time",
    "masks": "mask_build_time",
    "first": "time_to_first_output",
    "cycles": "cycles",
    "decode": "decode",
    "prefill": "prefill",
    "forests": "forests",
    "lists": "interval_lists",
    "serving": "serving",
}
OF_THEIR_OWN = (
    "paper",
    "cycles",
    "decode",
    "prefill",
    "forests",
    "serving",
)  # commands that say what their options are
DRY = ("paper", "serving")  # those that have a dry run
ROUNDS = {"sparsity": 3, "small": 7, "features": 5, "blocks": 5, "padding": 7, "maskcost": 9}
ROUNDS |= {"plan": 7, "masks": 7, "lists": 7, "first": 5}
BOTH_DIRECTIONS = {"small": "bwd: the forward and its backward"}


def module_of(command):
    return importlib.import_module(f"benchmarks.measure.gpu.{COMMANDS[command]}")


def parse(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        sub = commands.add_parser(name)
        sub.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)
        if name in OF_THEIR_OWN:
            module_of(name).add_arguments(sub)
        elif name in ROUNDS:
            sub.add_argument("--rounds", type=int, default=ROUNDS[name])
        if name in BOTH_DIRECTIONS:
            sub.add_argument("--op", choices=("fwd", "bwd"), default="fwd", help=BOTH_DIRECTIONS[name])
    arguments = parser.parse_args(words)
    arguments.what = arguments.command
    if arguments.command in BOTH_DIRECTIONS and arguments.op == "bwd":
        arguments.what = f"{arguments.command}-bwd"
    return arguments


class QuietProgress:
    def __init__(self, weights):
        pass

    def step(self, weight, text):
        pass


def surroundings(dry_run):
    """(environment, kernels of the library, card state now, progress type): invented in a dry run."""
    if dry_run:
        nothing = dict.fromkeys(("device", "driver", "toolkit", "torch"), "none")
        return nothing, kernels_used.DryKernels(), lambda: None, QuietProgress
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device: torch.cuda.is_available() is false")
    from benchmarks.instruments import timing

    library = kernels_used.here()
    return timing.environment() | {"toolkit": library.toolkit}, library, timing.card_state, timing.Progress


def main(words=None):
    arguments = parse(words)
    module = module_of(arguments.command)
    if arguments.dry_run and not os.environ.get("OUT"):
        sys.exit("a dry run writes invented figures: set OUT to a folder outside of the repository")
    if arguments.dry_run and arguments.command not in DRY:
        sys.exit(f"{arguments.command} has no dry run; these have: {', '.join(DRY)}")
    environment, arguments.kernels, card_state, progress_type = surroundings(arguments.dry_run)
    if hasattr(module, "check_arguments"):
        module.check_arguments(arguments)
    command = shlex.join(["python", "-m", "benchmarks.measure.gpu.bench", *(words or sys.argv[1:])])
    receipt = receipts.new(receipts.of_set(arguments.what, arguments.kernels.arch), environment, command)
    if hasattr(module, "kernel_hashes"):
        receipt["kernel_hashes"] = module.kernel_hashes(arguments)
    receipt["dry_run"] = arguments.dry_run
    receipt["card_before"] = card_state()
    path = receipts.path_of(receipt)
    passed = module.run(arguments, receipt, lambda: receipts.write(receipt, path), progress_type)
    receipt.update(card_after=card_state(), complete=True, passed=passed)
    receipts.write(receipt, path)
    print(
        f"{'PASS' if passed else 'FAIL'}  receipt {path.name}: {environment['device']}, "
        f"before {receipt['card_before']}, after {receipt['card_after']}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
