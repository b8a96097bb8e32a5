# SPDX-License-Identifier: Apache-2.0
"""Host time of a call of flashmask_attention with a ready plan, both directions, beyond empty operators.

The empty operator, flashmask_empty::forward (bindings/torch/empty_operator.cpp), has the schema of flashmask::forward,
is registered in the same way through LibTorch's stable ABI, allocates out and lse, and returns. It is called as its
overload, with all arguments by position and without gradients; its time is PyTorch's price of any operator. Ours is
the public function: it checks, looks the plan up, calls the operator, and the operator checks, allocates a workspace
and, on CUDA, launches the kernel.

For forward and backward together the empty counterpart is a torch.autograd.Function of flashmask_empty::forward and
backward (which allocates dq, dk and dv) that saves as much as ours, so that both go through PyTorch's autograd, which
hands over the same gradient of out.

The shapes are tiny, so that the device is idle before the next call: what is measured is the host. Batches of CALLS
calls, fewer than CUDA's launch queue takes without waiting, are timed from the first call to the return of the last;
then, untimed, the device is waited for. All contenders in every round, in an order shuffled anew; medians of the times,
and of the differences within a round.

FLASHMASK_TORCH_LIBRARY, FLASHMASK_LIBRARY and FLASHMASK_EMPTY_OPERATOR name the libraries. On CUDA, BARS are the most
that a call may cost without gradients, and that forward and backward together may; the exit status says whether both
are met.

--old FOLDER compares with another version instead, in the same run: the two take turns as processes, each with its own
Python package, libraries and copy of this program, and the ratios of a turn's figures are reported. FOLDER holds
python/flashmask, its torch_overhead.py somewhere in benchmarks/, the library under its soname, libflashmask_torch.so
and libflashmask_empty_operator.so of that version.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from flashmask import flashmask_attention, masks
from flashmask.torch import operators

BARS = {"no_grad": 15.0, "with_backward": 40.0}  # microseconds
BARS_OVER_OLD = {"no_grad": 0.94, "with_backward": 0.85}  # with --old
CALLS = 100
SEQLEN, HEADS, HEAD_DIM = 2, 1, 64
REPORTED = {
    "no_grad": "flashmask_attention beyond the empty operator, no gradients (the bar's)",
    "with_grad": "the same with inputs that require gradients",
    "with_backward": "forward and backward beyond the empty operators in a torch.autograd.Function (the second bar's)",
    "with_backward_beyond_operators": (
        "the same beyond the empty operators called one after the other, without autograd"
    ),
    "with_grad_beyond_function": "the same beyond the empty operator in a torch.autograd.Function that saves as much",
    "operator": "torch.ops.flashmask.forward beyond the empty operator, below autograd",
    "empty": "the empty operator, the whole call",
    "whole_no_grad": "flashmask_attention, the whole call, no gradients",
    "whole_with_backward": "flashmask_attention and its backward, all of it",
}


class EmptyFunction(torch.autograd.Function):
    """The empty operators with as much saved for a gradient as ours."""

    @staticmethod
    def forward(ctx, q, k, v, bounds, block_mask, plan, options):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.flashmask_empty.forward.default(q, k, v, bounds, block_mask, plan, *options)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse, bounds, block_mask, plan)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        with torch._C._AutoDispatchBelowAutograd():
            gradients = torch.ops.flashmask_empty.backward.default(dout, dlse, *ctx.saved_tensors, *ctx.options)
        return *gradients[:3], None, None, None, None


def below_autograd(operator, arguments):
    def call():
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return call


def with_backward(call, leaves, dout):
    return lambda: torch.autograd.grad(call()[0], leaves, dout)


def one_after_the_other(inputs, tensors, options, dout):
    """The empty operators, without autograd."""
    forward, backward = torch.ops.flashmask_empty.forward.default, torch.ops.flashmask_empty.backward.default

    def call():
        out, lse = forward(*inputs, *tensors, *options)
        return backward(dout, None, *inputs, out, lse, *tensors, *options)

    return call


def contenders(device):
    """{name: (call, whether gradients are enabled)}"""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, SEQLEN, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = masks.causal_document(seqlens=[SEQLEN // 2, SEQLEN // 2], device=device)
    bounds, block_mask, *band = operators.mask_arguments(mask)
    tensors, options = (bounds, block_mask, mask.plan()), (None, *band, False, "auto")
    ours, empty = (operator.forward.default for operator in (torch.ops.flashmask, torch.ops.flashmask_empty))
    dout, both = torch.randn_like(q), lambda: flashmask_attention(*leaves, mask, return_softmax_lse=True)
    empty_function = lambda: EmptyFunction.apply(*leaves, *tensors, options)
    return {
        "ours, backward": (with_backward(both, leaves, dout), True),
        "empty, backward": (with_backward(empty_function, leaves, dout), True),
        "empty operators": (one_after_the_other((q, k, v), tensors, options, dout), False),
        "ours": (lambda: flashmask_attention(q, k, v, mask), False),
        "ours, grad": (lambda: flashmask_attention(*leaves, mask), True),
        "operator": (below_autograd(ours, (q, k, v, *tensors, *options)), False),
        "empty": (lambda: empty(q, k, v, *tensors, *options), False),
        "empty below autograd": (below_autograd(empty, (q, k, v, *tensors, *options)), False),
        "empty, grad": (empty_function, True),
    }


def batch_us(call, wait):
    """Microseconds of one of CALLS calls."""
    wait()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - begin
    wait()
    return spent / CALLS * 1e6


def measured(calls, rounds, wait):
    """{name: microseconds in each round}"""
    samples, shuffle = {name: [] for name in calls}, random.Random(0)
    for n in range(rounds + 3):  # the first ones warm up
        order = list(calls)
        shuffle.shuffle(order)
        for name in order:
            call, grad = calls[name]
            with torch.set_grad_enabled(grad):
                us = batch_us(call, wait)
            if n >= 3:
                samples[name].append(us)
    return samples


def figures_of(samples):
    """Microseconds, named as in REPORTED."""

    def beyond(name, other):
        return statistics.median(a - b for a, b in zip(samples[name], samples[other]))

    return {
        "no_grad": beyond("ours", "empty"),
        "with_grad": beyond("ours, grad", "empty"),
        "with_grad_beyond_function": beyond("ours, grad", "empty, grad"),
        "with_backward": beyond("ours, backward", "empty, backward"),
        "with_backward_beyond_operators": beyond("ours, backward", "empty operators"),
        "operator": beyond("operator", "empty below autograd"),
        "empty": statistics.median(samples["empty"]),
        "whole_no_grad": statistics.median(samples["ours"]),
        "whole_with_backward": statistics.median(samples["ours, backward"]),
    }


def measure(device, rounds):
    """Measures and returns the report, a dictionary for JSON."""
    torch.ops.load_library(os.environ["FLASHMASK_EMPTY_OPERATOR"])
    torch.set_num_threads(1)
    calls = contenders(device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    gc.disable()
    samples = measured(calls, rounds, wait)
    gc.enable()
    microseconds = {name: round(us, 2) for name, us in figures_of(samples).items()}
    judged = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if judged else "cpu",
        "torch": torch.__version__,
        "rounds": rounds,
        "calls": CALLS,
        "bars": BARS if judged else None,
        "passed": not judged or all(microseconds[name] <= bar for name, bar in BARS.items()),
        "microseconds": microseconds,
    }


def environment_of(folder):
    """The environment in which the version in `folder` runs."""
    return {
        **os.environ,
        "PYTHONPATH": str(folder / "python"),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])),
        "FLASHMASK_LIBRARY": str(next(folder.glob("libflashmask.so*"))),
        "FLASHMASK_TORCH_LIBRARY": str(folder / "libflashmask_torch.so"),
        "FLASHMASK_EMPTY_OPERATOR": str(folder / "libflashmask_empty_operator.so"),
    }


def figures_in_turn(program, environment, device, rounds):
    """One version's microseconds, measured in a process of its own."""
    words = [sys.executable, str(program), "--device", str(device), "--rounds", str(rounds), "--json"]
    result = subprocess.run(words, env=environment, capture_output=True, text=True)
    lines = result.stdout.splitlines()
    if not lines:
        raise SystemExit(f"{program} failed: {result.stderr[-2000:]}")
    return json.loads(lines[-1])["microseconds"]


def compare(old, device, rounds, turns):
    """{name: [(ours, the version's in `old`), in each turn]}, microseconds"""
    its_own = next((old / "benchmarks").rglob("torch_overhead.py"))
    programs = [(Path(__file__), dict(os.environ)), (its_own, environment_of(old))]
    pairs = {name: [] for name in REPORTED}
    for turn in range(turns):
        found = {}
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which] = figures_in_turn(*programs[which], device, rounds)
        for name in REPORTED:
            pairs[name].append((found[0][name], found[1][name]))
        told = ", ".join(f"{name} {found[0][name]:.1f} / {found[1][name]:.1f}" for name in BARS)
        print(f"[{turn + 1} of {turns}] us, ours / old: {told}", file=sys.stderr, flush=True)
    return pairs


def report_comparison(pairs, as_json):
    """Prints medians over the turns; whether the bars are met."""
    medians = {name: round(statistics.median(a / b for a, b in of), 3) for name, of in pairs.items()}
    ours = {name: round(statistics.median(a for a, _ in of), 2) for name, of in pairs.items()}
    passed = all(medians[name] <= bar for name, bar in BARS_OVER_OLD.items())
    if as_json:
        print(json.dumps({"microseconds": ours, "over_old": medians, "bars": BARS_OVER_OLD, "passed": passed}))
    else:
        for name, ratio in medians.items():
            print(f"{ratio:6.3f}  {REPORTED[name]}")
    return 0 if passed else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--old", type=Path, help="folder of another version to compare with")
    parser.add_argument("--turns", type=int, default=3, help="of each version, with --old")
    arguments = parser.parse_args()
    if arguments.old:
        pairs = compare(arguments.old.resolve(), arguments.device, arguments.rounds, arguments.turns)
        return report_comparison(pairs, arguments.json)
    figures = measure(arguments.device, arguments.rounds)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, us in figures["microseconds"].items():
            print(f"{us:7.2f} us  {REPORTED[name]}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
