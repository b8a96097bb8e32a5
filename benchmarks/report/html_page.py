# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page of the cells that a library's kernels measured (receipts.judge) and, marked, of those by
kernels of another toolkit; it says how much else there is."""

from html import escape

from benchmarks import cell_bars, receipts
from benchmarks.report import unreceipted_peers
from benchmarks.report.pictures import drawings, marked_mask
from benchmarks.report.shapes import IN_WORDS, by_shape, chart_name, shape_text

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
    rows = [cell_bars.row_of(case) for case in cases]
    always = cell_bars.ALWAYS if rows[0]["arch"] == receipts.HOPPER else ()
    columns = [key for key in COLUMNS if key in always or any(r[key] for r in rows)]
    head = cells(["mask", "live", "TFLOP/s", *(COLUMNS[key] for key in columns)], "th")
    names = [marked_mask(case).replace("_", " ") for case in cases]
    body = [
        cells([name, f"{r['live']:.3f}", f"{r['tflops']:.0f}", *(ratio_text(r[key]) for key in columns)])
        for name, r in zip(names, rows)
    ]
    means = [ratio_text(cell_bars.mean_of(rows, key)) if key in ("flex", "v3") else "" for key in columns]
    body.append(cells(["geometric mean", "", f"{cell_bars.mean_of(rows, 'tflops'):.0f}", *means]))
    return f'<div class="wide"><table>{head}{"".join(body)}</table></div>'


def bars(cases):
    """The checks of each direction and of both together."""
    return [
        {**c, "name": f"{name}, {c['name']}"}
        for op, name in IN_WORDS.items()
        for c in cell_bars.checks(cell_bars.rows_of(cases, op), op)
    ]


def check_list(found):
    lines = [
        f'<tr><td class="name {"good" if c["passed"] else "bad"}">{"pass" if c["passed"] else "fail"}</td>'
        f'<td class="name">{escape(c["name"])}</td><td>{c["got"]:.3f}</td><td>{cell_bars.bar_text(c)}</td>'
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
    """The section on the origin of the figures."""
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
    """The section of peers measured next to our kernels without a receipt."""
    parts = []
    for title, about, head, rows in unreceipted_peers.tables(library):
        body = "".join(cells(row) for row in rows)
        parts += [
            f"<h2>{escape(title)}</h2><p>{escape(about)}</p>",
            f'<div class="wide"><table>{cells(head, "th")}{body}</table></div>',
        ]
    return "".join(parts)


def page(cases, figures, hidden, library):
    """The HTML page."""
    merged, images = cell_bars.with_totals(cases), drawings(cases, figures)
    parts = ["<h1>Masked attention on a GPU</h1>", provenance(cases, hidden, library)]
    if merged:
        parts += [
            "<h2>Bars</h2>",
            "<p>Every ratio is speed, with our plan's own time counted as ours: "
            "medians over rounds in which the contenders took turns, in another order each time.</p>",
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
