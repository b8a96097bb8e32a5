# SPDX-License-Identifier: Apache-2.0
"""Measured cases, forward, backward or both together, against the bars: FlashMask V3 (by its measured ratio to FlexAttention) and cuDNN.

Every ratio counts our plan's own time as ours and is speed: their time over our time.
"""

import json
import math
from pathlib import Path

V3_FILE = Path(__file__).resolve().parent / "data" / "flashmask_v3.json"
V3_RATIO = {"fwd": "v3_over_flex", "bwd": "v3_over_flex_backward"}
# op, head_dim: (seqlens, each cell, geometric mean), ours over V3; of both together only the mean has a bar
V3_BARS = {"fwd": {128: ((8192, 32768, 131072), 1.0, 1.15), 64: ((8192, 32768), 1.0, 1.20)},
           "bwd": {128: ((8192, 32768, 131072), 1.0, 1.05), 64: ((8192, 32768), 1.0, 1.20)},
           "total": {128: ((8192, 32768, 131072), None, 1.08), 64: ((8192, 32768), None, 1.20)}}
# op, head_dim: ours over cuDNN, for full and causal at these lengths
CUDNN_BARS = {"fwd": {128: 1.05, 64: 1.10}, "bwd": {128: 1.09, 64: 1.18}, "total": {}}
CUDNN_SEQLENS = (8192, 32768)


def v3_ratios(op="fwd"):
    """{(head_dim, seqlen, mask): V3 over FlexAttention}; of both directions together that is a case's own."""
    if op not in V3_RATIO:
        return {}
    return {(c["head_dim"], c["seqlen"], c["mask"]): c[V3_RATIO[op]] for c in json.loads(V3_FILE.read_text())["cells"]}


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def ratio_to(case, peer):
    """Their time over ours with the plan: the median over rounds if the case has it. None if the peer was not measured."""
    figures = case["peers"].get(peer)
    if figures is None:
        return None
    return figures.get("ratio_with_plan") or figures["ms"] / (case["ours_ms"] + case["plan_ms"])


def v3_over_flex(case, v3):
    """V3's speed over FlexAttention's in a case; None if it is not known."""
    return case.get("v3_over_flex") or v3.get((case["head_dim"], case["seqlen"], case["mask"]))


def total_of(forward, backward):
    """A case of both directions of one cell, with one plan: times are the sums of the medians."""
    ours = forward["ours_ms"] + backward["ours_ms"]
    flop = sum(case["ours_tflops"] * case["ours_ms"] for case in (forward, backward))
    peers = {name: {"ms": forward["peers"][name]["ms"] + backward["peers"][name]["ms"]} for name in ("flex", "cudnn")
             if name in forward["peers"] and name in backward["peers"]}
    if "deterministic" in backward["peers"]:
        ms = forward["ours_ms"] + backward["peers"]["deterministic"]["ms"]
        peers["deterministic"] = {"ms": ms, "ratio": ms / ours}
    v3 = [case["peers"]["flex"]["ms"] / ratio for case in (forward, backward)
          if "flex" in case["peers"] and (ratio := v3_over_flex(case, v3_ratios(case["op"])))]
    known = {"v3_over_flex": peers["flex"]["ms"] / sum(v3)} if len(v3) == 2 else {}
    return {**backward, "op": "total", "ours_ms": ours, "ours_tflops": flop / ours, "plan_ms": forward["plan_ms"], "peers": peers, **known}


def with_totals(cases):
    """The cases, and one more of each cell that was measured in both directions."""
    def cell(case):
        return tuple(case[name] for name in ("head_dim", "seqlen", "mask", "dtype"))

    backward = {cell(case): case for case in cases if case["op"] == "bwd"}
    return cases + [total_of(case, backward[cell(case)]) for case in cases if case["op"] == "fwd" and cell(case) in backward]


def row_of(case, v3=None):
    """What the table shows of a case."""
    v3 = v3_ratios(case["op"]) if v3 is None else v3
    flex, against = ratio_to(case, "flex"), v3_over_flex(case, v3)
    tflops = case["ours_tflops"] * case["ours_ms"] / (case["ours_ms"] + case["plan_ms"])
    return {"op": case["op"], "head_dim": case["head_dim"], "seqlen": case["seqlen"], "mask": case["mask"], "live": case["live"], "tflops": tflops, "flex": flex, "v3_over_flex": against,
            "v3": flex / against if flex and against else None, "cudnn": ratio_to(case, "cudnn"),
            "deterministic": case["peers"].get("deterministic", {}).get("ratio")}


def rows_of(cases, op="fwd"):
    v3 = v3_ratios(op)
    return [row_of(case, v3) for case in cases if case["op"] == op]


def check(name, got, bar, detail=""):
    return {"name": name, "got": got, "bar": bar, "passed": got >= bar, "detail": detail}


def v3_checks(rows, head_dim, seqlens, each, mean, label):
    cells = [r for r in rows if r["head_dim"] == head_dim and r["seqlen"] in seqlens and r["v3"]]
    if not cells:
        return []
    worst = min(cells, key=lambda r: r["v3"])
    of_each = [] if each is None else [check(f"{label}: every cell over V3", worst["v3"], each, f"worst {worst['mask']} {worst['seqlen']}, {len(cells)} cells")]
    return [*of_each,
            check(f"{label}: geometric mean over V3", geomean([r["v3"] for r in cells]), mean, f"{len(cells)} cells")]


def checks(rows, op="fwd"):
    """The bars of `op`, which all rows are of, as far as they reach: for each (head_dim, seqlen), and over the lengths of a head_dim."""
    found = []
    for head_dim, (seqlens, each, mean) in V3_BARS[op].items():
        present = sorted({r["seqlen"] for r in rows if r["head_dim"] == head_dim} & set(seqlens))
        for seqlen in present:
            found += v3_checks(rows, head_dim, (seqlen,), each, mean, f"d={head_dim} S={seqlen}")
        if len(present) > 1:
            found += v3_checks(rows, head_dim, present, each, mean, f"d={head_dim} all")
    for r in rows:
        if r["cudnn"] and CUDNN_BARS[op] and r["seqlen"] in CUDNN_SEQLENS and r["mask"] in ("full", "causal"):
            found.append(check(f"d={r['head_dim']} S={r['seqlen']} {r['mask']}: over cuDNN", r["cudnn"], CUDNN_BARS[op][r["head_dim"]]))
    return found


def cell_text(value, form="6.2f"):
    return format(value, form) if value is not None else " " * (int(form.split(".")[0]) - 1) + "-"


def table(rows):
    """The short table: one line a cell, then geometric means. Every column but TFLOP/s is a speed ratio; det: deterministic mode's time over
    the fast one's, where it was measured."""
    both = any(r["deterministic"] for r in rows)
    lines = [f"{'d':>4} {'S':>6} {'mask':22} {'live':>5} {'TFLOP/s':>8} {'/Flex':>6} {'V3/Fl':>6} {'/V3':>6} {'/cuDNN':>6}{'    det' if both else ''}"]
    for r in rows:
        lines.append(f"{r['head_dim']:4} {r['seqlen']:6} {r['mask']:22} {r['live']:5.3f} {r['tflops']:8.1f} {cell_text(r['flex'])} {cell_text(r['v3_over_flex'])} "
                     f"{cell_text(r['v3'])} {cell_text(r['cudnn'])}{' ' + cell_text(r['deterministic']) if both else ''}")
    for head_dim, seqlen in sorted({(r["head_dim"], r["seqlen"]) for r in rows}):
        cells = [r for r in rows if (r["head_dim"], r["seqlen"]) == (head_dim, seqlen)]
        means = [geomean(v) if (v := [r[k] for r in cells if r[k]]) else None for k in ("tflops", "flex", "v3_over_flex", "v3")]
        lines.append(f"{head_dim:4} {seqlen:6} {'geometric mean':22} {'':5} {cell_text(means[0], '8.1f')} {' '.join(cell_text(m) for m in means[1:])}")
    return lines


def check_lines(found):
    return [f"{'PASS' if c['passed'] else 'FAIL'}  {c['name']}: {c['got']:.3f} (bar {c['bar']:.2f}) {c['detail']}".rstrip() for c in found]
