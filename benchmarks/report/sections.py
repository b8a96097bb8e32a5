# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/performance/ but for cells: single measurements, tests on a GPU, the CPU (benchmarks/data/cpu.json)."""

import json

from benchmarks import DATA
from benchmarks.context_parallel.bars import both
from benchmarks.measure import wasted_work
from benchmarks.receipts import set_of, short_length
from benchmarks.report.markdown import listed, markdown_table, paragraph, percent, range_text, size_text

CPU, CPU_CACHE = DATA / "cpu.json", DATA / "cpu_cache.json"
PICTURES = "../img"  # from docs/performance


def figures_of(topics, name):
    return topics[name]["figures"] if name in topics else None


def suites(topics):
    """The receipts of `scripts/gpu-check tests`, that of all steps first."""
    return sorted(name for name in topics if name.split("-")[0] == "tests")


def of_suites(topics, figure):
    return [f[figure] for name in suites(topics) if (f := figures_of(topics, name)).get(figure)]


def section(title, command, *lines):
    """A section on the measurements of a command, which stands below the title."""
    return [f"## {title}", "", f"`{command}`", "", *lines, ""]


def sparsity(topics):
    found = figures_of(topics, "sparsity")
    if not found:
        return []
    fit = found["sparsity"]["fits"]["all"]
    return section(
        "Time against sparsity",
        "scripts/gpu-check sparsity",
        *paragraph(
            f"Forward, {size_text(found['sparsity']['head_dim'], found['sparsity']['seqlen'])}: the times of "
            f"{fit['samples']} masks lie on a line over the share of live tiles (R² {fit['r2']:.4f}) that meets zero "
            f"work at {percent(fit['intercept_share'])} of the full mask's time."
        ),
        f"![Time against sparsity]({PICTURES}/gpu-sparsity.svg)",
    )


def mask_cost(topics):
    found = figures_of(topics, "maskcost")
    if not found:
        return []
    cells = found["maskcost"]["cells"]
    dims = sorted({cell["head_dim"] for cell in cells}, reverse=True)
    rows = [
        [mask, *(f"+ {percent(c['cost'])}" for dim in dims for c in cells if (c["mask"], c["head_dim"]) == (mask, dim))]
        for mask in dict.fromkeys(cell["mask"] for cell in cells)
    ]
    return section(
        "Element masks",
        "scripts/gpu-check maskcost",
        f"Forward, {short_length(found['maskcost']['seqlen'])}: every tile partial, over every tile full.",
        "",
        *markdown_table(["mask", *(f"d = {dim}" for dim in dims)], rows),
    )


def wasted(_):
    """No receipt: it follows from the masks."""
    seqlen = 32768
    said = (
        f"Elements whose products a kernel computes, over those that the mask shows, {short_length(seqlen)}, by what "
        "it passes over as a whole: 64 rows x 128 keys on Hopper (128 rows in the backward at d = 64), 128 x 128 with "
        "mma.sync. The other two columns are no kernel's here: halves of such tiles, and tiles that begin at each "
        "document's first row."
    )
    command = f"python -m benchmarks.measure.wasted_work --seqlen {seqlen}"
    return section("Wasted work", command, *paragraph(said), *markdown_table(*wasted_work.table(seqlen)))


def features_cost(topics):
    found = figures_of(topics, "features")
    if not found:
        return []
    held = found["features"]
    keys = ("head_dim", "head_dim_v", "feature", "dtype")
    at = {(*(c[key] for key in keys), c["op"], c["mask"]): c["over_plain"] for c in held["cells"]}
    masks, ops = (list(dict.fromkeys(c[name] for c in held["cells"])) for name in ("mask", "op"))
    rows = [
        [
            str(d) if d == dv else f"{d} / {dv}",
            feature if dtype == "bfloat16" else f"{feature}, {dtype}",
            *(" / ".join(f"{at[(d, dv, feature, dtype, op, mask)]:.2f}" for mask in masks) for op in ops),
        ]
        for d, dv, feature, dtype in dict.fromkeys(tuple(c[key] for key in keys) for c in held["cells"])
    ]
    said = (
        f"Time of calls with them over the plain call's, {short_length(held['seqlen'])}, bfloat16 unless "
        f"float16 is named, {listed(masks)}; softcap {held['softcap']:g}, dropout {held['dropout']:g}; on an "
        f"{topics['features']['device']}."
    )
    head = ["d", "asked for", *(op.replace("fwd", "forward").replace("bwd", "backward") for op in ops)]
    command = "scripts/gpu-check features"
    return section("Sinks, softcap and dropout", command, *paragraph(said), *markdown_table(head, rows))


def features_text(topics):
    """The highest cost of softcap and dropout in a training step's attention."""
    found = figures_of(topics, "features")
    if not found:
        return ""
    cells = [c for c in found["features"]["cells"] if c["op"] == "fwd + bwd"]
    names = {
        "softcap": "with a softcap",
        "ALiBi": "with ALiBi",
        "dropout": "with dropout",
        "all": "with a sink and both",
    }
    worst = {name: max((c["over_plain"] for c in cells if c["feature"] == name), default=None) for name in names}
    times = [f"{worst[name]:.1f} times as long {said}" for name, said in names.items() if worst[name]]
    if not times:
        return ""
    return (
        "[Features](performance/measurements.md#sinks-softcap-and-dropout) run in kernels of their own: beside the "
        f"plain call, forward and backward together take up to {listed(times)}."
    )


def padding(topics):
    found = figures_of(topics, "padding")
    if not found:
        return []
    held = found["padding"]
    at = {(c["head_dim"], c["instance"], c["op"], c["mask"]): c["over_instance"] for c in held["cells"]}
    columns = list(dict.fromkeys((c["op"], c["mask"]) for c in held["cells"]))
    rows = [
        [f"{dim} in {of}", *(f"{at[(dim, of, *column)]:.2f}" for column in columns)]
        for dim, of in dict.fromkeys((c["head_dim"], c["instance"]) for c in held["cells"])
    ]
    said = f"Time of head dims between two instances over that of the larger one, {short_length(held['seqlen'])}."
    table = markdown_table(["d", *map(" ".join, columns)], rows)
    return section("Head dims by padding", "scripts/gpu-check padding", said, "", *table)


def blocks(topics):
    found = figures_of(topics, "blocks")
    if not found:
        return []
    held = found["blocks"]
    at = {(round(c["live"], 2), c["seqlen"], c["op"]): c for c in held["cells"]}
    columns = list(dict.fromkeys((c["seqlen"], c["op"]) for c in held["cells"]))
    rows = [
        [percent(live), *(block_text(at[(live, *column)]) for column in columns)]
        for live in dict.fromkeys(live for live, *_ in at)
    ]
    said = (
        f"Random block masks of 128 x 128, d = {held['head_dim']}, bfloat16: time over the live share of the full "
        f"mask's, on an {topics['blocks']['device']}. {blocks_bar_text(held)} {NO_BLOCK_SPARSE_PEER}"
    )
    names = {"fwd": "forward", "bwd": "backward"}
    head = ["live blocks", *(f"{short_length(seqlen)} {names[op]}" for seqlen, op in columns)]
    return section("Block masks", "scripts/gpu-check blocks", *paragraph(said), *markdown_table(head, rows))


NO_BLOCK_SPARSE_PEER = (
    "Block masks were measured beside our own full mask alone, not beside "
    "[Block-Sparse-Attention](https://github.com/mit-han-lab/Block-Sparse-Attention)."
)


def block_text(cell):
    """Sets a figure that misses its bar in bold."""
    return f"{cell['over_share']:.3f}" if cell["passed"] else f"**{cell['over_share']:.3f}**"


def blocks_bar_text(held):
    """Which cells have a bar, and how many hold it."""
    cells, least = held["cells"], held["least_live"]
    barred, rest = ([c for c in cells if (c["live"] >= least) == has_bar] for has_bar in (True, False))
    if not barred:
        return ""
    held_text = f"{sum(c['passed'] for c in barred)} of {len(barred)} cells hold it, those in bold do not."
    rest_text = (
        f" The rest, of at most {max(c['live'] for c in rest):.2%}, have none; the receipt counts them as passed, "
        f"and so {sum(c['passed'] for c in cells)} of {len(cells)}."
        if rest
        else ""
    )
    return f"A bar of {barred[0]['bar']:.2f} was set for live shares of at least {least:.0%}: {held_text}{rest_text}"


def planning(topics):
    found = figures_of(topics, "plan")
    if not found:
        return []
    sizes = {}
    for cell in found["plan"]:
        sizes.setdefault((cell["seqlen"], cell["batch"]), []).append(cell)
    rows = [
        [short_length(seqlen), batch, *(f"{max(c[name] for c in cells):.1f} us" for name in ("graph_us", "events_us"))]
        for (seqlen, batch), cells in sizes.items()
    ]
    head = ["tokens", "masks", "in a CUDA graph", "single calls from Python"]
    said = "On the GPU, the slowest of the twelve masks."
    return section("The plan", "scripts/gpu-check plan", said, "", *markdown_table(head, rows))


def building(topics):
    found = figures_of(topics, "masks")
    if not found:
        return []
    columns, cells = found["masks"]["columns"], found["masks"]["cells"]
    said = f"The vectors of one mask of {columns:,} columns: a replayed CUDA graph, and one core of its host."
    rows = [[f["mask"], f"{f['replay_us']:.1f} us", f"{f['host_ms']:.2f} ms"] for f in cells]
    return section(
        "Building a mask", "scripts/gpu-check masks", said, "", *markdown_table(["mask", "GPU", "host"], rows)
    )


def small(topics):
    lines = []
    for name, what in (("small", "forward"), ("small-bwd", "forward and backward")):
        found = figures_of(topics, name)
        if found:
            sizes = found["small"]
            lines += [f"{sizes['calls']:,} calls of {what}, batch {sizes['batch']}, microseconds a call:", ""]
            lines += [*small_table(sizes["cells"]), ""]
    return section("Small problems", "scripts/gpu-check small [--op bwd]", *lines[:-1]) if lines else []


def small_table(cells):
    names = {
        "ours": "C interface",
        "ours_in_pytorch": "PyTorch package",
        "ours_in_graph": "the same in a CUDA graph",
        "empty_operators": "operators that do nothing, PyTorch",
        "cudnn": "cuDNN, PyTorch",
        "flex": "FlexAttention",
    }
    used = [name for name in names if any(name in cell["us"] for cell in cells)]
    rows = [
        [
            cell["mask"],
            f"{cell['heads']} of {cell['seqlen']:,}",
            cell["head_dim"],
            *(f"{cell['us'][name]:.0f}" if name in cell["us"] else "" for name in used),
        ]
        for cell in cells
    ]
    return markdown_table(["mask", "heads of tokens", "d", *(names[name] for name in used)], rows)


def host_time(topics):
    found = of_suites(topics, "torch_overhead")
    if not found:
        return []
    times = [measured["microseconds"] for measured in found]
    empty, forward, whole = ([t[name] for t in times] for name in ("empty", "no_grad", "with_backward"))
    bars = next((measured["bars"] for measured in found if measured["bars"]), {})
    asked = "; ".join(
        bar_text(what, t, bars[name])
        for what, name, t in (("a forward", "no_grad", forward), ("forward and backward", "with_backward", whole))
        if name in bars
    )
    return section(
        "Host time of a PyTorch call",
        "scripts/gpu-check tests --only overhead",
        *paragraph(
            f"An operator that does nothing (`benchmarks/measure/torch_overhead.py`) takes {us_text(empty)} of the "
            f"host. Beyond it, a forward with a ready plan takes {us_text(forward)}, forward and backward "
            f"{us_text(whole)}{f' ({asked})' * bool(asked)}. In a CUDA graph the host does nothing for them."
        )[:-1],
    )


def bar_text(what, values, bar):
    """Says if the longest of some times holds its bar."""
    return f"{what} {'holds' if max(values) <= bar else 'misses'} its bar of {bar:.0f} us"


def jax_speed(topics):
    found = next(iter(of_suites(topics, "jax_speed")), None)
    if not found:
        return []
    said = {"forward": "forward", "with_gradient": "forward + backward"}
    head = ["tokens", "mask", "", "ours, us", "jax.nn, us", "jax.nn's over ours", "with `deterministic=False`"]
    rows = [
        [row["seqlen"], row["mask"], said[row["direction"]], f"{row['flashmask_us']:.0f}", f"{row['jax_nn_us']:.0f}"]
        + [f"{row[name]:.2f}" if name in row else "" for name in ("ratio", "fast_ratio")]
        for row in found["rows"]
    ]
    return section(
        "JAX",
        "scripts/gpu-check tests --only jax_speed",
        *paragraph(
            "Times of `flashmask.jax.dot_product_attention` and of jax.nn's with cuDNN, both jitted, JAX "
            f"{found['jax']}, {found['heads']} heads, head dim {found['head_dim']} "
            "(`benchmarks/measure/jax_overhead.py`). The shortest shape, of one head, shows what a call costs the host."
        ),
        *markdown_table(head, rows),
    )


def us_text(values):
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{low} us" if low == high else f"{low} to {high} us"


def first_call(topics):
    found = figures_of(topics, "first")
    if not found:
        return []
    seconds = max(cell["seconds"] for cell in found["first"])
    said = f"A fresh process has its first output {seconds:.3f} s after the inputs are there."
    return section("First call", "scripts/gpu-check first", said)


def overlap_text(run):
    """How `way="overlap"` of context parallelism does beside gather, by one of its receipts."""
    held = run["figures"]["context_parallel"]
    cells = [c["times"] for c in held["cells"]]
    ratios = [both(t["overlap"]) / both(t["gather"]) for t in cells if "overlap" in t and "gather" in t]
    if not ratios:
        return ""
    slower = sum(ratio > 1 for ratio in ratios)
    return (
        f'On {held["ranks"]} GPUs of one host `way="overlap"` is slower than gather in {slower} of {len(ratios)} '
        f"cells: it takes {range_text(ratios)} times as long."
    )


def measurements(topics):
    parts = (sparsity, mask_cost, blocks, wasted, features_cost, padding, planning, building)
    parts += (small, host_time, jax_speed, first_call)
    drawn = f"![Memory of one mask]({PICTURES}/gpu-mask-memory.svg)"
    memory = section("Memory of a mask", "python -m benchmarks.report --docs", *paragraph(MEMORY), drawn)
    return [*(line for part in parts for line in part(topics)), *memory]


MEMORY = (
    "Computed from the formats. A mask's vectors grow with the length, its plan in bits with the square of it, by one "
    "byte for 128 x 128 elements: 64 MiB at 1M tokens. In runs a plan grows with the length: 3.3 MiB at 1M tokens."
)


def part_counts(parts):
    """{part: [passed, failed, skipped]}; "NAME, from 5000" counts as a further process of "NAME"."""
    counts = {}
    for part in parts:
        held = counts.setdefault(part["name"].partition(", from ")[0], [0, 0, 0])
        held[:] = (n + part.get(key, 0) for n, key in zip(held, ("passed", "failed", "skipped")))
    return counts


def tests(topics):
    """Counts of `scripts/gpu-check tests`."""
    rows = [
        [kernel_set, part, passed, failed, skipped or "", run["device"], run["date"]]
        for name in suites(topics)
        for run, kernel_set in [(topics[name], set_of(name))]
        for part, (passed, failed, skipped) in part_counts(figures_of(topics, name)["parts"]).items()
    ]
    said = paragraph(
        "`scripts/gpu-check tests` on the kernels of each set; a part that runs into its time limit counts as failed. "
        "`torch: overhead` is the bar of [a call's host time](measurements.md#host-time-of-a-pytorch-call)."
    )
    head = ["kernels", "part", "passed", "failed", "skipped", "device", "date"]
    return [*said, *markdown_table(head, rows), ""] if rows else []


# --- The CPU -----------------------------------------------------------------------------------------


def cpu_rows(held, part):
    return [row for row in held["results"] if row["part"] == part]


def cpu_columns(rows):
    return list(dict.fromkeys((row["seqlen"], row["head_dim"]) for row in rows))


def cpu_dense(held):
    rows, said = cpu_rows(held, "dense"), {"fwd + bwd": "forward + backward"}
    kinds = dict.fromkeys((row["dtype"], row["what"]) for row in rows)
    found = {(r["dtype"], r["what"], r["seqlen"], r["head_dim"]): r["speed"] for r in rows}
    columns = cpu_columns(rows)
    lines = [
        [f"{dtype}, {said.get(what, what)}", *(f"{found[(dtype, what, *at)]:.2f}" for at in columns)]
        for dtype, what in kinds
    ]
    return markdown_table(["PyTorch's time over ours", *(f"S = {s}, d = {d}" for s, d in columns)], lines)


def cpu_masks(held):
    names = ("forward_speed", "both_speed", "flex_speed")
    rows = [[r["mask"], f"{r['live']:.3f}", *(f"{r[n]:.2f}" for n in names)] for r in cpu_rows(held, "masks")]
    return markdown_table(["mask", "live", "SDPA, forward", "SDPA, both", "FlexAttention, forward"], rows)


def cpu_peak(held):
    rows = cpu_rows(held, "peak")
    columns = cpu_columns(rows)
    found = {(r["what"], r["seqlen"], r["head_dim"]): r["share"] for r in rows}
    passes = dict.fromkeys(row["what"] for row in rows)
    lines = [[what, *(f"{found[(what, *at)]:.0%}" for at in columns)] for what in passes]
    return markdown_table(["share of the peak", *(f"S = {s}, d = {d}" for s, d in columns)], lines)


def cpu_cache():
    held = json.loads(CPU_CACHE.read_text())
    rows = [[r["dtype"], f"{r['share_of_read']:.0%}", f"{r['torch_over_ours']:.1f}"] for r in held["results"]]
    batch, keys = held["results"][0]["batch"], held["results"][0]["keys"]
    return [
        *paragraph(
            f"One row of attention over a paged KV cache, {batch} requests of {keys} keys, 32 query heads over 8 key "
            f"heads, d = 128, pages of 16 in a random order ({held['machine']}; PyTorch {held['torch']}). "
            "`python -m benchmarks.measure.cpu_cache` prints the table: the time of reading the cache's memory over "
            "ours, and of SDPA over gathered keys."
        ),
        *markdown_table(["", "share of reading", "SDPA over ours"], rows),
    ]


def cpu_section():
    held = json.loads(CPU.read_text())
    low, high = held["peak_gflops"]
    return [
        *paragraph(
            f"{held['machine'][:1].upper()}{held['machine'][1:]}; PyTorch {held['torch']}. Figures are medians of "
            "ratios within a run; only those can be compared between rows. `python -m benchmarks.measure.cpu_vs_torch` "
            "prints these tables; [cpu.json](../../benchmarks/data/cpu.json) keeps what it printed."
        ),
        f"Dense attention, {held['heads']} heads:",
        "",
        *cpu_dense(held),
        "",
        *paragraph(
            f"The twelve masks, S = {held['mask_seqlen']}, d = {held['mask_head_dim']}, {held['mask_heads']} heads, "
            "float32 (`--parts masks --flex`): time over ours of SDPA with the mask as a matrix of bools, and of "
            "FlexAttention's compiled forward."
        ),
        *cpu_masks(held),
        "",
        *paragraph(
            f"Share of the machine's float32 multiply-adds (`--peak`; {low} to {high} GFLOP/s, measured in the same "
            "rounds). Only the products count as work: softmax, masks and reading tiles are part of what is missing."
        ),
        *cpu_peak(held),
        "",
        *cpu_cache(),
    ]
