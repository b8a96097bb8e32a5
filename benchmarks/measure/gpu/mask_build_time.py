# SPDX-License-Identifier: Apache-2.0
"""Building the vectors of one mask of 131,072 columns, on the GPU and on one core of the host.

Timed by replaying a graph of one build or of many (kernels alone), and by events around back-to-back calls.
"""

import torch

from benchmarks.instruments.medians import middle
from benchmarks.instruments.timing import Contender, graph_of, interleaved
from benchmarks.measure import mask_build

IN_GRAPH = 20
BAR_US = 30


def measure(case, rounds):
    on_host, build = mask_build.Build(*case, "cpu").build(), mask_build.Build(*case, "cuda").build()
    if not torch.equal(build.bounds.cpu(), on_host.bounds):
        raise AssertionError(f"{case[0]}: other vectors on the GPU than on the host")
    contenders = {
        "replay": Contender(graph_of(build.build, 1)),
        "graph": Contender(graph_of(build.build, IN_GRAPH), calls=IN_GRAPH),
    }
    build.build()
    contenders["events"] = Contender(build.launch)
    samples = interleaved(contenders, rounds, target_ms=5.0)
    times = {f"{name}_us": middle(values) * 1e3 for name, values in samples.items()}
    return {**times, "host_ms": mask_build.host_ms(on_host), "passed": times["replay_us"] <= BAR_US}


def kernel_hashes(arguments):
    return arguments.kernels.of_masks()


def run(arguments, receipt, save, progress_type):
    cases = mask_build.cases()
    progress, figures = progress_type([1] * len(cases)), []
    for name, case in cases.items():
        figures.append({"mask": name, **measure(case, arguments.rounds)})
        progress.step(1, name)
    receipt["figures"]["masks"] = {"columns": mask_build.COLUMNS, "bar_us": BAR_US, "cells": figures}
    save()
    print(f"      {'':28} replayed  in a graph of {IN_GRAPH}    calls   on one core of the host")
    for f in figures:
        print(
            f"{'PASS' if f['passed'] else 'FAIL'}  {f['mask']:28}{f['replay_us']:6.1f} us{f['graph_us']:17.1f} us"
            f"{f['events_us']:6.1f} us{f['host_ms']:17.2f} ms"
        )
    return all(f["passed"] for f in figures)
