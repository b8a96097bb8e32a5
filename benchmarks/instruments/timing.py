# SPDX-License-Identifier: Apache-2.0
"""Time on a GPU, by CUDA events around as many calls as fill a measurement, in another order each round (orders.py).

Each measurement begins with an untimed call of its own: the card's power state carries over from one kernel to the
next, and a first launch takes longer.
"""

import subprocess
import sys
import time

import torch

from benchmarks.instruments.orders import orders


def event_ms(call, repeats, lead_in=1):
    """Milliseconds of one of `repeats` back-to-back calls."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    for _ in range(lead_in):
        call()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def repeats_for(call, target_ms):
    """Calls that fill about target_ms; warms up."""
    call()
    once = event_ms(call, 1)
    if once < 2:
        once = event_ms(call, 10)
    return max(1, round(target_ms / once)), once


class Contender:
    """`call` enqueues work that counts as `calls` of what is named; `scale` multiplies its time (a part for all)."""

    def __init__(self, call, calls=1, scale=1.0, **record):
        self.call, self.calls, self.scale, self.record = call, calls, scale, record

    def warm_up(self, target_ms):
        self.repeats, once = repeats_for(self.call, target_ms)
        # A long call is timed less often and without a lead-in: it varies less, too.
        self.rounds = 3 if once > 600 else None
        self.lead_in = 0 if once > 300 else min(self.repeats, 2)

    def measure(self):
        return event_ms(self.call, self.repeats, self.lead_in) * self.scale / self.calls


def interleaved(contenders, rounds, target_ms=30.0, seed=0):
    """{name: [ms or None for each round]}; None where a slow contender sat a round out."""
    for contender in contenders.values():
        contender.warm_up(target_ms)
    samples = {name: [] for name in contenders}
    for n, order in enumerate(orders(contenders, rounds, seed)):
        for name in order:
            resting = contenders[name].rounds is not None and n >= contenders[name].rounds
            samples[name].append(None if resting else contenders[name].measure())
    return samples


def graph_of(call, calls):
    """A function that replays a CUDA graph of `calls` calls. `call` must enqueue on the current stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def card_state():
    """Clocks, temperature and power as nvidia-smi reads them; None where it does not answer."""
    names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    try:
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "-i", "0"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.split("\n")[0]
        return dict(zip(("sm_mhz", "memory_mhz", "celsius", "watts"), (float(x) for x in line.split(","))))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def command_line(words):
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def environment():
    """Device, its multiprocessors, driver, toolkit and torch, for a receipt."""
    driver = command_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]).split("\n")[
        0
    ]
    release = [line for line in command_line(["nvcc", "--version"]).split("\n") if "release" in line]
    toolkit = release[0].split("release")[1].split(",")[0].strip() if release else f"torch's {torch.version.cuda}"
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "device": torch.cuda.get_device_name(),
        "multiprocessors": multiprocessors,
        "driver": driver or "unknown",
        "toolkit": toolkit,
        "torch": torch.__version__,
    }


class Progress:
    """Lines with percent and the time left, by the weights of the steps."""

    def __init__(self, weights):
        self.total, self.done, self.begin = sum(weights) or 1, 0.0, time.monotonic()

    def step(self, weight, text):
        self.done += weight
        spent, share = time.monotonic() - self.begin, self.done / self.total
        print(
            f"[{share:4.0%} {spent:5.0f} s, {spent * (1 - share) / share:4.0f} s left] {text}",
            file=sys.stderr,
            flush=True,
        )
