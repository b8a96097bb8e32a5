#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The documents' figures, SVG files and one self-contained HTML page, from the receipts of GPU runs.

    python benchmarks/report.py --docs
    python benchmarks/report.py [--library build/release/src/libflashmask.so] [--html out/gpu.html] [--svg out]

--docs writes docs/performance.md, docs/performance/, docs/end-to-end.md, the figures of README and other pages, and
docs/img/gpu-*.svg from all receipts (documents.py). The HTML page has only what the library's kernels measured, cell by
cell (receipts.judge), and, marked, what kernels of another toolkit did; it says how much else there is.
"""

import argparse
import math
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import beside  # noqa: E402
import charts  # noqa: E402
import documents  # noqa: E402
import performance  # noqa: E402
import receipts  # noqa: E402
import verdict  # noqa: E402
from end_to_end import page as page_end_to_end  # noqa: E402
from receipts import short_length  # noqa: E402
from shapes import IN_WORDS, by_shape, chart_name, heads_text, shape_text  # noqa: E402

OURS, FLEX, CUDNN, V3, FA3, DENSE = "#2f6fde", "#d9822b", "#3f9c6b", "#8a63c9", "#c2527a", "#9aa5b1"
FA2, SDPA = FA3, DENSE  # which never stand beside each other
SERIES = [
    ("ours", "flashmask (plan included)", OURS, "box"),
    ("deterministic", "flashmask, deterministic", OURS, "hollow"),
    (verdict.V3, "FlashMask V3", V3, "box"),
    ("fa3", "FlashAttention-3", FA3, "box"),
    ("fa2", "FlashAttention-2", FA2, "box"),
    ("flex", "FlexAttention", FLEX, "box"),
    ("cudnn", "cuDNN", CUDNN, "box"),
    ("dense", "flashmask, dense mask", DENSE, "box"),
    ("sdpa", "SDPA, dense mask", SDPA, "box"),
]
KINDS = [
    ("causal_document", "causal document", OURS),
    ("shared_question", "shared question", FLEX),
    ("document", "document", CUDNN),
]
CSS = """
:root{--page:#f4f6f8;--card:#fff;--ink:#1f2933;--soft:#66727f;--line:#e3e8ed;--good:#2c7a52;--bad:#b3372f}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--card:#161b22;--ink:#e6edf3;--soft:#9aa7b4;\
--line:#2b333c;--good:#58b889;--bad:#e5746c}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,\
'Segoe UI',Roboto,Arial,sans-serif}
main{max-width:1160px;margin:0 auto;padding:32px 20px 64px}h1{font-size:26px;margin:0 0 4px}\
h2{font-size:19px;margin:36px 0 10px}p{color:var(--soft);margin:4px 0 12px;max-width:80ch}
.wide{overflow-x:auto}svg{display:block;max-width:100%;height:auto}\
table{border-collapse:collapse;background:var(--card);border-radius:8px;font-size:13px;\
font-variant-numeric:tabular-nums}
th,td{padding:5px 12px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
th{color:var(--soft);font-weight:500}.name{text-align:left}
.good{color:var(--good)}.bad{color:var(--bad)}.notice{color:var(--bad)}
""".strip()


def tflops_of(case):
    """TFLOP/s of everyone in a case. Ours counts the plan."""
    flop = case["ours_tflops"] * case["ours_ms"]
    times = {name: figures["ms"] for name, figures in verdict.with_v3(case)["peers"].items()}
    times["ours"] = case["ours_ms"] + case["plan_ms"]
    return {key: flop / times[key] if key in times else None for key, *_ in SERIES}


def marked_mask(case):
    """The mask's name, with a star where the kernels are another toolkit's."""
    return case["mask"] + " *" * case["marked"]


def speed_chart(cases):
    """Figure 5 of the paper for one direction, head dim and length: TFLOP/s by mask."""
    first = cases[0]
    groups = [(marked_mask(case), tflops_of(case)) for case in cases]
    series = [s for s in SERIES if any(values[s[0]] for _, values in groups)]
    from_file = any("from" in verdict.with_v3(case)["peers"].get(verdict.V3, {}) for case in cases)
    kernels = "" if first["arch"] == receipts.HOPPER else f"{first['arch']}: "
    title = f"{kernels}{IN_WORDS[first['op']]}, head dim {first['head_dim']}, {short_length(first['seqlen'])} tokens"
    subtitle = (
        f"TFLOP/s over the tiles that are visible; batch {first['batch']}, {heads_text(first)}, "
        f"{first['dtype']}; {first['run']['device']}"
    )
    note = (
        "FlashMask V3 was measured next to these kernels in a run of its own (benchmarks/data); its bars are our "
        "rate divided by the ratio of the times there."
    )
    return charts.bar_chart(title, subtitle, groups, series, "TFLOP/s", note if from_file else "")


def sparsity_chart(figures):
    """Figure 4a of the paper: latency against block sparsity."""
    points = [
        (p["kind"], 1 - p["live"], p["ms"], f"{p['kind']}: sparsity {1 - p['live']:.3f}, {p['ms']:.2f} ms")
        for p in figures["points"]
    ]
    fit = figures["fits"]["all"]
    zero_work = (1.0, max(0.0, fit["intercept_ms"]))
    line = ("#9aa5b1", (0.0, fit["intercept_ms"] + fit["slope_ms"]), zero_work)
    return charts.scatter_chart(
        "Latency against block sparsity",
        f"Forward, head dim {figures['head_dim']}, {short_length(figures['seqlen'])} tokens, batch {figures['batch']}, "
        f"{figures['heads']} heads",
        points,
        KINDS,
        "share of 128 x 128 tiles that are empty",
        "ms",
        [line],
        f"Dashed: a line through all {fit['samples']} masks, R² {fit['r2']:.4f}; "
        f"at zero work {fit['intercept_share']:+.1%} of a full mask's time.",
    )


def bytes_text(count):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:g} {unit}"
        count /= 1024
    return ""


def memory_chart():
    """Figure 4b of the paper: memory of one mask against length. Computed, not measured."""
    lengths = [4096 * 2**n for n in range(9)]
    series = [
        ("dense, bf16", DENSE, "line", [2 * s * s for s in lengths]),
        ("dense, 1 byte", FLEX, "line", [s * s for s in lengths]),
        ("4 vectors", V3, "line", [16 * s for s in lengths]),
        ("1 vector", OURS, "line", [4 * s for s in lengths]),
        ("plan, both directions", OURS, "dash", [plan_bytes(s) for s in lengths]),
    ]
    return charts.log_chart(
        "Memory of one mask",
        "One mask for all heads; a mask is 1 to 4 int32 vectors over the keys",
        lengths,
        series,
        "tokens",
        "bytes",
        short_length,
        bytes_text,
        "Computed from the formats. "
        "The plan, made from the vectors when they are used, is at most 1 byte for a tile of 128 x 128.",
    )


def plan_bytes(seqlen):
    """Two bits for each granule of 64 x 128, stored by rows and by keys."""
    rows, keys = math.ceil(seqlen / 64), math.ceil(seqlen / 128)
    return 16 * (rows * math.ceil(keys / 64) + keys * math.ceil(rows / 64))


def drawings(cases, figures):
    """{file stem: SVG} of cells, of what topics found, and of what is computed."""
    made = {chart_name(alike[0]): speed_chart(alike) for alike in by_shape(verdict.with_totals(cases))}
    if "sparsity" in figures:
        made["sparsity"] = sparsity_chart(figures["sparsity"])
    return {**made, "mask-memory": memory_chart()}


def cells(values, kind="td", first="name"):
    return (
        "<tr>"
        + "".join(f'<{kind} class="{first if n == 0 else ""}">{escape(str(v))}</{kind}>' for n, v in enumerate(values))
        + "</tr>"
    )


def ratio_text(value):
    return f"{value:.2f}x" if value else "–"


COLUMNS = {
    "flex": "over FlexAttention",
    "v3": "over FlashMask V3",
    "fa3": "over FlashAttention-3",
    "fa2": "over FlashAttention-2",
    "cudnn": "over cuDNN",
    "sdpa": "over SDPA, dense mask",
    "deterministic": "time, deterministic",
    receipts.SMALL: "time, 99 KiB tiles",
}


def table(cases):
    rows = [verdict.row_of(case) for case in cases]
    always = verdict.ALWAYS if rows[0]["arch"] == receipts.HOPPER else ()
    columns = [key for key in COLUMNS if key in always or any(r[key] for r in rows)]
    head = cells(["mask", "live", "TFLOP/s", *(COLUMNS[key] for key in columns)], "th")
    names = [marked_mask(case).replace("_", " ") for case in cases]
    body = [
        cells([name, f"{r['live']:.3f}", f"{r['tflops']:.0f}", *(ratio_text(r[key]) for key in columns)])
        for name, r in zip(names, rows)
    ]
    means = [ratio_text(verdict.mean_of(rows, key)) if key in ("flex", "v3") else "" for key in columns]
    body.append(cells(["geometric mean", "", f"{verdict.mean_of(rows, 'tflops'):.0f}", *means]))
    return f'<div class="wide"><table>{head}{"".join(body)}</table></div>'


def bars(cases):
    """The checks of each direction and of both together."""
    return [
        {**c, "name": f"{name}, {c['name']}"}
        for op, name in IN_WORDS.items()
        for c in verdict.checks(verdict.rows_of(cases, op), op)
    ]


def check_list(found):
    lines = [
        f'<tr><td class="name {"good" if c["passed"] else "bad"}">{"pass" if c["passed"] else "fail"}</td>'
        f'<td class="name">{escape(c["name"])}</td><td>{c["got"]:.3f}</td><td>{verdict.bar_text(c)}</td>'
        f'<td class="name">{escape(c["detail"])}</td></tr>'
        for c in found
    ]
    return (
        '<div class="wide"><table><tr><th></th><th class="name">bar</th><th>reached</th><th>asked</th><th></th></tr>'
        f"{''.join(lines)}</table></div>"
        if lines
        else ""
    )


def provenance(cases, hidden, library):
    """Where the figures come from."""
    if not cases:
        lines = [
            '<p class="notice">No cell was measured with the kernels of this library: what follows is computed, '
            "not measured.</p>"
        ]
    else:
        lines = [f"<p>{escape('; '.join(sorted({software(case['run']) for case in cases})))}.</p>"]
    if any(case["marked"] for case in cases):
        toolkit = escape(library.toolkit)
        lines.append(f"<p>* measured with kernels of another toolkit than the library's, {toolkit}.</p>")
    if hidden:
        lines.append(f"<p>Not shown, as the library's kernels are others by now: {escape('; '.join(hidden))}.</p>")
    return "".join(lines)


def software(run):
    return f"{run['device']}, driver {run['driver']}, {run['toolkit']}, torch {run['torch']}"


def peer_section(library):
    """What was measured next to our kernels without a receipt."""
    parts = []
    for title, about, head, rows in beside.tables(library):
        body = "".join(cells(row) for row in rows)
        parts += [
            f"<h2>{escape(title)}</h2><p>{escape(about)}</p>",
            f'<div class="wide"><table>{cells(head, "th")}{body}</table></div>',
        ]
    return "".join(parts)


def page(cases, figures, hidden, library):
    """The HTML page."""
    merged, images = verdict.with_totals(cases), drawings(cases, figures)
    parts = ["<h1>Masked attention on a GPU</h1>", provenance(cases, hidden, library)]
    if merged:
        parts += [
            "<h2>Bars</h2>",
            "<p>Every ratio is speed, with our plan's own time counted as ours: "
            "medians over rounds in which the contenders took turns in shuffled order.</p>",
            check_list(bars(merged)),
        ]
    for alike in by_shape(merged):
        parts += [
            f"<h2>{shape_text(alike[0])}</h2>",
            f'<div class="wide">{images[chart_name(alike[0])]}</div>',
            table(alike),
        ]
    parts.append(peer_section(library))
    for name, title in (("sparsity", "Latency against sparsity"), ("mask-memory", "Memory")):
        if name in images:
            parts += [f"<h2>{title}</h2>", f'<div class="wide">{images[name]}</div>']
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>flashmask on a GPU</title><style>{CSS}</style><main>{''.join(parts)}</main></html>\n"
    )


# --- The command -------------------------------------------------------------------------------------


def shown_of(found, library):
    """(cells to be shown, figures of the topics to be shown, what is not shown and why)."""
    cases, figures, hidden = [], {}, {}
    for file, case, state in receipts.judge(found, library):
        if state not in (receipts.FRESH, receipts.OTHER_TOOLKIT):
            hidden.setdefault(f"{file}, {state}", []).append(case)
        elif case:
            cases.append({**case, "run": receipts.run_of(found[file], case), "marked": state == receipts.OTHER_TOOLKIT})
        else:
            figures.update(found[file]["figures"])
    return cases, figures, [f"{len(c)} of {why}" if c[0] else why for why, c in hidden.items()]


def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=receipts.RESULTS, help="folder of receipts")
    parser.add_argument(
        "--library", type=Path, help="whose kernels count; default: $FLASHMASK_LIBRARY, or one that was built here"
    )
    parser.add_argument("--html", type=Path, default=Path("out/gpu.html"))
    parser.add_argument("--svg", type=Path, help="also write each chart to this folder")
    parser.add_argument("--docs", action="store_true", help="write the documents' figures, and no page")
    return parser.parse_args(words)


def write_svg(folder, drawn):
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        (folder / f"gpu-{name}.svg").write_text(svg)
        print(folder / f"gpu-{name}.svg")


def write_page(arguments):
    library = receipts.library_of(arguments.library)
    if library is None:
        raise ValueError("there is no library to judge the receipts by; build one or name it: --library")
    cases, figures, hidden = shown_of(receipts.load_folder(arguments.results), library)
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    arguments.html.write_text(page(cases, figures, hidden, library))
    print(f"{arguments.html}: {len(cases)} cells")
    if arguments.svg:
        write_svg(arguments.svg, drawings(cases, figures))
    for why in hidden:
        print(f"not shown: {why}", file=sys.stderr)


def warn_of_stale(found, path):
    """The documents show every receipt. A library with GPU kernels, if there is one, says which are of others."""
    try:
        library = receipts.library_of(path)
    except ValueError as error:
        print(f"stale cells are not known: {error}", file=sys.stderr)
        return
    judged = receipts.judge(found, library) if library else []
    for line in sorted({f"{file} is {state}" for file, _, state in judged if state.startswith("stale")}):
        print(f"in the documents, though a cell of {line}", file=sys.stderr)


def write_documents(found):
    pages = documents.pages(found)
    folder = documents.ROOT / performance.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if str(path.relative_to(documents.ROOT)) not in pages:
            path.unlink()
    for name, text in pages.items():
        (documents.ROOT / name).write_text(text, encoding="utf-8")
        print(name)
    write_svg(documents.ROOT / documents.PICTURES, drawings_of_documents(found))


def drawings_of_documents(found):
    """{file stem: SVG} of all pictures in docs/img that are drawn from {file name: receipt}."""
    cases, topics = documents.of_receipts(found)
    return {**drawings(cases, figures_in(topics)), **page_end_to_end.drawings(topics)}


def figures_in(topics):
    return {name: value for receipt in topics.values() for name, value in receipt["figures"].items()}


def main(words=None):
    arguments = parse_arguments(words)
    try:
        if arguments.docs:
            found = receipts.load_folder(arguments.results)
            write_documents(found)
            warn_of_stale(found, arguments.library)
        else:
            write_page(arguments)
    except ValueError as error:
        sys.exit(f"report: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
