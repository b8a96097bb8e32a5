# SPDX-License-Identifier: Apache-2.0
"""Decode over KV caches on a Hopper GPU, beside FlashAttention-3, FlashInfer and XQA, and a stream that only reads.

A call is one new row of every request, with a ready plan. Bytes are those of K and V. Peers are measured where their
libraries are (benchmarks/peers/), and a cell says why one is left out. Further steps: a tree of drafts, a window and
evicted keys, plan.update, and the host's time of a call.
"""

import functools
import sys
import time

from benchmarks import cell_bars, receipts
from benchmarks.measure.gpu import decode_bars, decode_shapes

PLAN_KERNELS = ("sm90.cache.blocks", "sm90.cache.shares")


def add_arguments(parser):
    parser.add_argument("--rounds", type=int, default=9, help="of cells below 1 GB; others have 3")
    parser.add_argument("--budget", type=float, default=280, help="seconds after which nothing more is begun")
    parser.add_argument("--cells", default="", help="only cells with this in their names, in a receipt of their own")
    peers = tuple(decode_bars.PEERS)
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers)


def check_arguments(arguments):
    if arguments.kernels.arch == decode_bars.MMA_SYNC:
        arguments.peers = [peer for peer in arguments.peers if peer == "flashinfer"]
    elif arguments.kernels.arch != receipts.HOPPER:
        sys.exit(f"decode measures kernels of {receipts.HOPPER} and sm80, and {arguments.kernels.arch} is in use")
    if arguments.cells:
        arguments.what = "decode-cells"


def check_is_hopper(arguments):
    if arguments.kernels.arch != receipts.HOPPER:
        sys.exit(f"{arguments.what} measures kernels of {receipts.HOPPER}, and {arguments.kernels.arch} is in use")


def steps_of(session, steps, cells):
    """[(where its figures belong, what it is called, the step)], the most wanted first. `steps`: their module."""

    def of_model(model):
        for shape in decode_shapes.shapes_of(model, session.pools[0].numel()):
            pages = [page for page in decode_shapes.layouts_of(shape) if cells in shape.name(page)]
            if pages:
                name = shape.name(pages[0]).split(" page")[0]
                yield "cells", name, functools.partial(steps.of_shape, session, shape, pages)

    first, *others = (list(of_model(model)) for model in decode_shapes.MODELS)
    extra = [
        ("masks", "a tree", steps.tree),
        ("masks", "a window and evicted keys", steps.far_keys),
        ("updates", "plan.update", steps.plan_updates),
        ("host", "the host", steps.host_times),
        ("float8", "float8", steps.float8),
        ("invariance", "batch_invariant", steps.invariance),
    ]
    only_cells = cells or session.arguments.kernels.arch != receipts.HOPPER
    extra = [] if only_cells else [(where, name, functools.partial(step, session)) for where, name, step in extra]
    stream = ("cells", "the stream", session.find_stream)
    return [stream, *first, *extra, *(step for model in others for step in model)]


def cell_line(cell):
    checks = decode_bars.of_cell(cell)
    mark = "PASS" if all(c["passed"] for c in checks) else "FAIL"
    own = {decode_bars.PEERS.get(name, name): over for name, over in cell["over_ours"].items()}
    own |= {"stream": cell.get("stream_share"), "over page 64": cell.get("over_64")}
    ratios = "  ".join(f"{name} {value:.2f}" for name, value in own.items() if value is not None)
    speed = f"{cell['mb']:7.1f} MB {cell['us']['ours']:8.1f} us {cell['gb_per_s']:5.0f} GB/s"
    return f"{mark}  {cell['cell']:42}{speed}  {ratios}"


def line_of(row):
    if "gb_per_s" in row:
        return cell_line(row)
    if "cell" in row:
        return f"      {row['cell']}: " + ", ".join(f"{name} {us:.1f} us" for name, us in row["us"].items())
    of_host = f", the host {row['host_us']:.1f} us" if "host_us" in row else ""
    return f"      {row.get('update') or 'the host, a call of ' + row['contender']}: {row['us']:.1f} us{of_host}"


def measure(steps, figures, budget, save):
    """Goes through the steps while there is time; one that fails is put down and does not end the run."""
    begin = time.monotonic()
    for where, name, step in steps:
        if time.monotonic() - begin > budget:
            figures["not_measured"].append(name)
            continue
        try:
            found = step()
        except Exception as why:
            figures["failed"][name] = f"{type(why).__name__}: {why}".split("\n")[0][:300]
            print(f"FAIL  {name}: {figures['failed'][name]}", flush=True)
            continue
        figures[where] += found
        for row in found:
            print(line_of(row), flush=True)
        if found:
            save()


def summary(figures):
    """The last lines of a run: what was left out, and the bars that were missed."""
    rows = [*figures["cells"], *figures["masks"], *figures["float8"], *figures["invariance"]]
    reasons = dict.fromkeys(f"{name}: {why}" for row in rows for name, why in row["left_out"].items())
    checks = decode_bars.of_all(figures)
    missed = [c for c in checks if not c["passed"]]
    left = f", {len(figures['not_measured'])} steps not measured" * bool(figures["not_measured"])
    return [
        *(f"----  {reason}" for reason in reasons),
        *(f"FAIL  {name}: {why}" for name, why in figures["failed"].items()),
        *(f"stream with {n} stages: {rate:.0f} GB/s" for n, rate in figures["stream_gb_per_s"].items()),
        f"{len(checks) - len(missed)} of {len(checks)} bars held{left}; missed:",
        *(cell_bars.check_lines(missed) or ["none"]),
    ]


def list_summary(figures, lists, checks):
    """Likewise of a run whose rows are in `lists`, with every step that was not measured."""
    rows = [row for name in lists for row in figures[name]]
    reasons = dict.fromkeys(f"{name}: {why}" for row in rows for name, why in row["left_out"].items())
    missed = [c for c in checks if not c["passed"]]
    return [
        *(f"----  {reason}" for reason in reasons),
        *(f"FAIL  {name}: {why}" for name, why in figures["failed"].items()),
        *(f"----  not measured: {name}" for name in figures["not_measured"]),
        f"{len(checks) - len(missed)} of {len(checks)} bars held; missed:",
        *(cell_bars.check_lines(missed) or ["none"]),
    ]


def run_lists(arguments, receipt, save, lists, steps_of, bars_of):
    """Measures what steps_of(session) has into `lists` of the receipt's figures, and judges it by bars_of(figures)."""
    from benchmarks.measure.gpu import decode_steps

    session = decode_steps.Session(arguments)
    figures = {name: [] for name in (*lists, "not_measured")} | {"failed": {}, "versions": {}}
    receipt["figures"][arguments.what] = figures

    def save_so_far():
        figures["versions"] = session.versions()
        receipt["kernel_hashes"] = arguments.kernels.hashes_of({*PLAN_KERNELS, *session.kernels})
        save()

    measure(steps_of(session), figures, arguments.budget, save_so_far)
    checks = bars_of(figures)
    print("\n".join(list_summary(figures, lists, checks)))
    return passes(receipt, checks, figures["failed"])


def passes(receipt, checks, failed):
    """Puts into the receipt how many bars held; true if all did and no step failed."""
    held = sum(check["passed"] for check in checks)
    receipt["tests"] = {"passed": held, "failed": len(checks) - held + len(failed)}
    return receipt["tests"]["failed"] == 0


def run(arguments, receipt, save, progress_type):
    from benchmarks.measure.gpu import decode_steps

    session = decode_steps.Session(arguments)
    lists = ("cells", "masks", "updates", "host", "float8", "invariance", "not_measured")
    figures = {name: [] for name in lists} | {"failed": {}}
    figures |= {"versions": {}, "stream_gb_per_s": session.streams}
    receipt["figures"]["decode"] = figures

    def save_so_far():
        figures["versions"] = session.versions()
        receipt["kernel_hashes"] = arguments.kernels.hashes_of({*PLAN_KERNELS, *session.kernels})
        save()

    measure(steps_of(session, decode_steps, arguments.cells), figures, arguments.budget, save_so_far)
    print("\n".join(summary(figures)))
    return passes(receipt, decode_bars.of_all(figures), figures["failed"])
