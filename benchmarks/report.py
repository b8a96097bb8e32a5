#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page, and SVG files, from the receipts of GPU runs.

    python benchmarks/report.py [--results benchmarks/results] [--html out/gpu.html] [--svg docs/img]

Only receipts of the newest state of the sources are shown: those of this tree's hash, or with --hash those of another one.
The page says how many others there are.
"""

import argparse
import math
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import charts  # noqa: E402
import paper_masks  # noqa: E402
import receipts  # noqa: E402
import verdict  # noqa: E402

OURS, FLEX, CUDNN, V3, DENSE = "#2f6fde", "#d9822b", "#3f9c6b", "#8a63c9", "#9aa5b1"
OPS = {"fwd": "Forward", "bwd": "Backward", "total": "Total"}
IN_WORDS = {**OPS, "total": "Forward and backward"}
SERIES = [("ours", "flashmask (plan included)", OURS, "box"), ("deterministic", "flashmask, deterministic", OURS, "hollow"), ("v3", "FlashMask V3 (derived)", V3, "hollow"), ("flex", "FlexAttention", FLEX, "box"), ("cudnn", "cuDNN", CUDNN, "box"),
          ("dense", "flashmask, dense mask", DENSE, "box")]
KINDS = [("causal_document", "causal document", OURS), ("shared_question", "shared question", FLEX), ("document", "document", CUDNN)]
CSS = """
:root{--page:#f4f6f8;--card:#fff;--ink:#1f2933;--soft:#66727f;--line:#e3e8ed;--good:#2c7a52;--bad:#b3372f}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--card:#161b22;--ink:#e6edf3;--soft:#9aa7b4;--line:#2b333c;--good:#58b889;--bad:#e5746c}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif}
main{max-width:1160px;margin:0 auto;padding:32px 20px 64px}h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 10px}p{color:var(--soft);margin:4px 0 12px;max-width:80ch}
.wide{overflow-x:auto}svg{display:block;max-width:100%;height:auto}table{border-collapse:collapse;background:var(--card);border-radius:8px;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 12px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}th{color:var(--soft);font-weight:500}.name{text-align:left}
.good{color:var(--good)}.bad{color:var(--bad)}.notice{color:var(--bad)}
""".strip()


def short_length(seqlen):
    return f"{seqlen // 1024}K" if seqlen % 1024 == 0 else str(seqlen)


def tflops_of(case, v3):
    """TFLOP/s of everyone in a case. Ours counts the plan; V3 is FlexAttention here times V3's measured ratio to it."""
    def rate(ms):
        return case["ours_tflops"] * case["ours_ms"] / ms

    values = {name: rate(case["peers"][name]["ms"]) if name in case["peers"] else None for name in ("flex", "cudnn", "dense", "deterministic")}
    ratio = verdict.v3_over_flex(case, v3)
    values["ours"] = rate(case["ours_ms"] + case["plan_ms"])
    values["v3"] = values["flex"] * ratio if values["flex"] and ratio else None
    return values


def speed_chart(cases, device):
    """Figure 5 of the paper for one direction, head dim and length: TFLOP/s by mask."""
    first = cases[0]
    v3 = verdict.v3_ratios(first["op"])
    groups = [(case["mask"], tflops_of(case, v3)) for case in cases]
    series = [s for s in SERIES if any(values[s[0]] for _, values in groups)]
    return charts.bar_chart(f"{IN_WORDS[first['op']]}, head dim {first['head_dim']}, {short_length(first['seqlen'])} tokens",
                            f"TFLOP/s over the tiles that are visible; batch {first['batch']}, {first['heads']} heads, {first['dtype']}; {device}", groups, series, "TFLOP/s",
                            "FlashMask V3 was not in this run: its bars are FlexAttention's of this run times the ratio measured on an H200 (benchmarks/data)."
                            if any(s[0] == "v3" for s in series) else "")


def sparsity_chart(figures):
    """Figure 4a of the paper: latency against block sparsity."""
    points = [(p["kind"], 1 - p["live"], p["ms"], f"{p['kind']}: sparsity {1 - p['live']:.3f}, {p['ms']:.2f} ms") for p in figures["points"]]
    fit = figures["fits"]["all"]
    zero_work = (1.0, max(0.0, fit["intercept_ms"]))
    line = ("#9aa5b1", (0.0, fit["intercept_ms"] + fit["slope_ms"]), zero_work)
    return charts.scatter_chart("Latency against block sparsity", f"Forward, head dim {figures['head_dim']}, {short_length(figures['seqlen'])} tokens, batch {figures['batch']}, "
                                f"{figures['heads']} heads", points, KINDS, "share of 128 x 128 tiles that nobody sees", "ms", [line],
                                f"Dashed: a line through all {fit['samples']} masks, R² {fit['r2']:.4f}; at zero work {fit['intercept_share']:+.1%} of a full mask's time.")


def bytes_text(count):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:g} {unit}"
        count /= 1024
    return ""


def memory_chart():
    """Figure 4b of the paper: memory of one mask against length. Computed, not measured."""
    lengths = [4096 * 2**n for n in range(9)]
    series = [("dense, bf16", DENSE, "line", [2 * s * s for s in lengths]), ("dense, 1 byte", FLEX, "line", [s * s for s in lengths]),
              ("4 vectors", V3, "line", [16 * s for s in lengths]), ("1 vector", OURS, "line", [4 * s for s in lengths]),
              ("plan, both directions", OURS, "dash", [plan_bytes(s) for s in lengths])]
    return charts.log_chart("Memory of one mask", "One mask for all heads; a mask is 1 to 4 int32 vectors over the keys", lengths, series, "tokens", "bytes", short_length, bytes_text,
                            "Computed from the formats. The plan, made from the vectors when they are used, is at most 1 byte for a tile of 128 x 128.")


def plan_bytes(seqlen):
    """Two bits for each granule of 64 x 128, stored by rows and by keys."""
    rows, keys = math.ceil(seqlen / 64), math.ceil(seqlen / 128)
    return 16 * (rows * math.ceil(keys / 64) + keys * math.ceil(rows / 64))


def by_shape(cases):
    """[(op, head_dim, seqlen), cases], the forward first, then the largest head dim; the masks as the paper has them, whichever run they are of."""
    cases = sorted(cases, key=lambda c: paper_masks.NAMES.index(c["mask"]))
    shapes = sorted({(list(OPS).index(c["op"]), c["op"], -c["head_dim"], c["seqlen"]) for c in cases})
    return [((op, -d, s), [c for c in cases if (c["op"], c["head_dim"], c["seqlen"]) == (op, -d, s)]) for _, op, d, s in shapes]


def chart_name(op, head_dim, seqlen):
    return f"{OPS[op].lower()}-d{head_dim}-{short_length(seqlen).lower()}"


def drawings(shown):
    """{file stem: SVG} of everything that these receipts hold, and of what is computed."""
    device = next((r["device"] for r in shown if r["cases"]), "")
    made = {chart_name(*shape): speed_chart(cases, device) for shape, cases in by_shape(verdict.with_totals(receipts.merge(shown)))}
    for receipt in shown:
        if "sparsity" in receipt["figures"]:
            made["sparsity"] = sparsity_chart(receipt["figures"]["sparsity"])
    return {**made, "mask-memory": memory_chart()}


def cells(values, kind="td", first="name"):
    return "<tr>" + "".join(f'<{kind} class="{first if n == 0 else ""}">{escape(str(v))}</{kind}>' for n, v in enumerate(values)) + "</tr>"


def ratio_text(value):
    return f"{value:.2f}x" if value else "–"


def table(rows):
    both = any(r["deterministic"] for r in rows)
    columns = ["flex", "v3_over_flex", "v3", "cudnn"] + ["deterministic"] * both
    head = cells(["mask", "live", "TFLOP/s", "over FlexAttention", "V3 over FlexAttention", "over V3 (derived)", "over cuDNN"] + ["time, deterministic"] * both, "th")
    body = [cells([r["mask"].replace("_", " "), f"{r['live']:.3f}", f"{r['tflops']:.0f}", *(ratio_text(r[k]) for k in columns)]) for r in rows]
    means = [verdict.geomean(v) if (v := [r[k] for r in rows if r[k]]) else None for k in ("tflops", "flex", "v3_over_flex", "v3")]
    body.append(cells(["geometric mean", "", f"{means[0]:.0f}", *map(ratio_text, means[1:]), *[""] * (1 + both)]))
    return f'<div class="wide"><table>{head}{"".join(body)}</table></div>'


def bars(cases):
    """The checks of each direction and of both together."""
    return [{**c, "name": f"{name}, {c['name']}"} for op, name in IN_WORDS.items() for c in verdict.checks(verdict.rows_of(cases, op), op)]


def check_list(found):
    lines = [f'<tr><td class="name {"good" if c["passed"] else "bad"}">{"pass" if c["passed"] else "fail"}</td><td class="name">{escape(c["name"])}</td>'
             f"<td>{c['got']:.3f}</td><td>{c['bar']:.2f}</td><td class=\"name\">{escape(c['detail'])}</td></tr>" for c in found]
    return f'<div class="wide"><table><tr><th></th><th class="name">bar</th><th>reached</th><th>asked</th><th></th></tr>{"".join(lines)}</table></div>' if lines else ""


def provenance(shown, hidden, tree_hash):
    """Where the figures come from."""
    if not shown:
        lines = [f'<p class="notice">No receipt belongs to the sources {escape(tree_hash)}: what follows is computed, not measured.</p>']
    else:
        lines = [f"<p>{escape(', '.join(sorted({r['device'] for r in shown})))}; {escape(', '.join(sorted({text for r in shown for text in software(r)})))}; sources "
                 f"{escape(', '.join(sorted({r['source_hash'] for r in shown})))}; {sum(r['tests']['passed'] for r in shown)} checks passed, {sum(r['tests']['failed'] for r in shown)} failed.</p>"]
    if hidden:
        lines.append(f"<p>{len(hidden)} receipts of other sources are not shown: {escape(', '.join(hidden))}.</p>")
    return "".join(lines)


def software(receipt):
    return f"driver {receipt['driver']}", f"CUDA {receipt['toolkit']}", f"torch {receipt['torch']}"


def page(shown, hidden, tree_hash):
    """The HTML page."""
    merged, images = verdict.with_totals(receipts.merge(shown)), drawings(shown)
    parts = ["<h1>Masked attention on a GPU</h1>", provenance(shown, hidden, tree_hash)]
    if merged:
        parts += ["<h2>Bars</h2>", "<p>Every ratio is speed, with our plan's own time counted as ours: medians over rounds in which the contenders took turns in shuffled order.</p>",
                  check_list(bars(merged))]
    for (op, d, s), cases in by_shape(merged):
        parts += [f"<h2>{IN_WORDS[op]}, head dim {d}, {short_length(s)}</h2>", f'<div class="wide">{images[chart_name(op, d, s)]}</div>', table(verdict.rows_of(cases, op))]
    for name, title in (("sparsity", "Latency against sparsity"), ("mask-memory", "Memory")):
        if name in images:
            parts += [f"<h2>{title}</h2>", f'<div class="wide">{images[name]}</div>']
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>flashmask on a GPU</title><style>{CSS}</style><main>{"".join(parts)}</main></html>\n'


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=receipts.RESULTS, help="folder of receipts")
    parser.add_argument("--hash", help="show the receipts of these sources; default: this tree's")
    parser.add_argument("--html", type=Path, default=Path("out/gpu.html"))
    parser.add_argument("--svg", type=Path, help="also write each chart to this folder")
    arguments = parser.parse_args(words)
    try:
        found = receipts.load_folder(arguments.results)
    except ValueError as error:
        sys.exit(f"report: {error}")
    wanted = arguments.hash or receipts.source_hash()
    hidden = receipts.stale(found, arguments.hash)
    shown = [r for name, r in found.items() if name not in hidden]
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    arguments.html.write_text(page(shown, hidden, wanted))
    print(f"{arguments.html}: {len(shown)} receipts of {wanted}, {len(hidden)} of other sources")
    if arguments.svg:
        arguments.svg.mkdir(parents=True, exist_ok=True)
        for name, svg in drawings(shown).items():
            (arguments.svg / f"gpu-{name}.svg").write_text(svg)
            print(arguments.svg / f"gpu-{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
