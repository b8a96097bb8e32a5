# SPDX-License-Identifier: Apache-2.0
"""docs/end-to-end.md and its pictures, from the receipts of run.py; benchmarks.report --docs writes them.

What has no receipt yet is said to be not measured.
"""

from benchmarks import charts
from benchmarks.end_to_end import paper_tables
from benchmarks.end_to_end.figures import (
    CONTENDERS,
    FIGURES,
    MODEL_HEADS,
    MODEL_LAYERS,
    OVER_NOTHING,
    QUADRATIC,
    TASKS,
    bins,
    not_measured,
    problems,
    short_length,
    topic,
)
from benchmarks.report import end_to_end_kernels
from benchmarks.report.markdown import listed, markdown_table, ms_text, paragraph, percent, speed_text

PAGE = "docs/end-to-end.md"
NAMES = {
    "ours": "flashmask",
    "flex": "FlexAttention",
    "varlen": "torch's varlen",
    "sdpa": "SDPA, dense mask",
    "dense": "flashmask, dense mask",
    "vanilla": "materialised",
    "nothing": "no attention",
}
COLOURS = {
    "ours": "#2f6fde",
    "flex": "#d9822b",
    "varlen": "#3f9c6b",
    "sdpa": "#c2527a",
    "dense": "#8a63c9",
    "vanilla": "#7a5c3a",
    "nothing": "#9aa5b1",
}
IN_WORDS = {"sft": "SFT", "lora": "LoRA", "dpo": "DPO", "rm": "reward model"}
MODELS = {"1b": "1B", "3b": "3B", "8b": "8B", "tiny": "tiny"}
LOSS_SERIES = [
    ("ours True", "skipping, deterministic", COLOURS["ours"], "stroke-width:6;stroke-opacity:0.35"),
    ("dense True", "dense mode, deterministic", COLOURS["sdpa"], "stroke-dasharray:7 5"),
    ("ours False", "skipping, not deterministic", COLOURS["varlen"], "stroke-width:1"),
    ("sdpa False", "SDPA under a dense mask, not deterministic", COLOURS["flex"], "stroke-width:1"),
]
GIB = 2**30


def held(topics, name):
    """The results of a figure that were measured, and what the receipt says of where; ([], None) without one."""
    receipt = topics.get(topic(name))
    if receipt is None:
        return [], None
    if wrong := problems(name, receipt["figures"]):
        raise ValueError(f"{receipt['what']}: {'; '.join(wrong[:5])}")
    return receipt["figures"]["results"], receipt


def checks_of(topics, name):
    return topics[topic(name)]["figures"]["checks"] if topic(name) in topics else []


def where(receipt):
    return (
        f"{receipt['date']}, {receipt['device']}, PyTorch {receipt['torch']}, transformers {receipt['transformers']}"
        + ("" if receipt["complete"] else "; not all of it is measured yet")
    )


def size_text(count):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return ""


def ended_text(result):
    """Text in place of a figure."""
    return "out of memory" if "out_of_memory" in result else "failed" if "failed" in result else "–"


# --- Throughput --------------------------------------------------------------------------------------


def cells_of(results):
    """{(model, task, seqlen): {contender: result}}, in the order of the page."""
    found = {}
    for r in results:
        found.setdefault((r["model"], r["task"], r["seqlen"]), {})[r["contender"]] = r
    order = [*MODELS], [*TASKS]
    return dict(sorted(found.items(), key=lambda at: (order[0].index(at[0][0]), order[1].index(at[0][1]), at[0][2])))


def place_text(model, task, seqlen):
    return f"{MODELS[model]} {IN_WORDS[task]}, {short_length(seqlen)}"


def taking_part(cells):
    return [name for name in CONTENDERS if any(name in found for found in cells.values())]


def table_by_contender(cells, names, show):
    """A row for each cell, a column for each contender."""
    rows = []
    for at, found in cells.items():
        texts = [
            "" if name not in found else show(found[name]) if "step_ms" in found[name] else ended_text(found[name])
            for name in names
        ]
        rows.append([place_text(*at), *texts])
    return markdown_table(["", *(NAMES[name] for name in names)], rows)


def over_ours(found, name):
    """The step of a contender over ours."""
    pair = [found.get(n, {}).get("step_ms") for n in (name, "ours")]
    return pair[0] / pair[1] if all(pair) else None


def throughput(topics):
    results, receipt = held(topics, "throughput")
    lines = ["## Throughput", "", *paragraph(ABOUT_THROUGHPUT)]
    if not results:
        return lines + not_measured("throughput")
    cells = cells_of(results)
    names = taking_part(cells)
    others = [name for name in names if name != "ours"]
    ratios = [
        [place_text(*at), sparsity_text(found), *(speed_text(over_ours(found, name)) for name in others)]
        for at, found in cells.items()
    ]
    return [
        *lines,
        f"{where(receipt)}.",
        "",
        *(f"![Tokens per second, {IN_WORDS[task]}](img/gpu-{stem(task)}.svg)" for task in drawn_tasks(cells)),
        "",
        "Thousands of tokens per second:",
        "",
        *table_by_contender(cells, names, lambda r: f"{r['tokens_per_second'] / 1e3:.1f}"),
        "",
        "A step's time over ours; *no attention* is what the rest of the step takes:",
        "",
        *markdown_table(["", "sparsity", *(NAMES[name] for name in others)], ratios),
        "",
        *attention_alone(cells),
        *first_steps(cells, names),
        *step_masks(cells, names),
    ]


ABOUT_THROUGHPUT = (
    "Figure 2 of the paper. Models of Llama 3.2's shapes (1B, 3B) and of Llama 3.1's (8B) with random weights, "
    "bfloat16, one sequence a step, all layers checkpointed, fused AdamW; LoRA adapts all linear layers with rank 16. "
    "Documents and answers follow the paper's recipe (appendix A.2.1): of 240 sequences those at 10, 30, 50, 70 and "
    "90 % in the order of sparsity are trained on in turn, and every step makes its mask anew. Each attention has a "
    "process of its own; a figure is the median of its steps after two. DPO's reference model runs in every step."
)


def sparsity_text(found):
    shares = next((r["sparsity"] for r in found.values() if "sparsity" in r), None)
    return f"{percent(sorted(shares)[len(shares) // 2])}" if shares else ""


ABOUT_ATTENTION = (
    "What attention adds to a step without it, and the rate of the kernels in that time: 4 operations for each live "
    "element and column of the head dim forward, 2.5 times as many backward; a checkpointed layer runs forward twice, "
    "DPO's reference once more. The last column is the rate at which a step would take "
    f"{OVER_NOTHING} times what it takes without attention: the tensor cores of an H100 or H200 have 989 TFLOP/s in "
    "bfloat16 by their data sheets. Both steps are taken to spend the same time on the rest: where that is slower "
    "without attention, at the limit of power, the rate comes out too high."
)


def attention_alone(cells):
    """The rate of attention in our steps, and the one that the bar over a step without attention asks for."""
    rows = []
    for at, found in cells.items():
        if "step_ms" in found.get("ours", {}) and "step_ms" in found.get("nothing", {}):
            without = found["nothing"]["step_ms"]
            added, tflop = found["ours"]["step_ms"] - without, attention_tflop(*at, found["ours"]["sparsity"])
            rates = [1e3 * tflop / ms for ms in (added, without * (OVER_NOTHING - 1))]
            rows.append([place_text(*at), f"{added:.0f}", f"{tflop:.1f}", *(f"{rate:.0f}" for rate in rates)])
    if not rows:
        return []
    head = ["", "attention, ms", "TFLOP", "TFLOP/s", f"for {OVER_NOTHING}"]
    return ["### Attention in a step", "", *paragraph(ABOUT_ATTENTION), *markdown_table(head, rows), ""]


def attention_tflop(model, task, seqlen, sparsity):
    """TFLOP of attention in a step of the median sparsity."""
    head_dim, heads, _ = MODEL_HEADS[model]
    live = 1 - sorted(sparsity)[len(sparsity) // 2]
    forwards = 3 if task == "dpo" else 2
    return 1e-12 * MODEL_LAYERS[model] * 4 * seqlen**2 * live * head_dim * heads * (forwards + 2.5)


def first_steps(cells, names):
    said = (
        "Seconds of the first step of each task in its process, which does the tasks of one model and length one after "
        "another: FlexAttention's kernels, and for every contender what is around the attention, are compiled, or "
        "found in the compilers' caches on the disk."
    )
    cold = [place_text(*at) for at, found in cells.items() if found.get("flex", {}).get("compiler_cache") == "empty"]
    said += f" The caches were empty for {listed(cold)}." if cold else ""
    attention = [name for name in names if name != "nothing"]
    return [
        "### The first step",
        "",
        *paragraph(said),
        *table_by_contender(cells, attention, lambda r: f"{r['first_step_s']:.1f}"),
        "",
    ]


def step_masks(cells, names):
    attention = [name for name in names if name != "nothing"]
    show = lambda r: f"{size_text(r['mask_bytes'])}, {ms_text(r['mask_ms'])} ms"  # noqa: E731
    return [
        "### The mask, and peak memory",
        "",
        "Memory of the mask with all that is derived from it, and the time to make it:",
        "",
        *table_by_contender(cells, attention, show),
        "",
        "Peak memory of training, GiB:",
        "",
        *table_by_contender(cells, names, lambda r: f"{r['peak_bytes'] / GIB:.1f}"),
        "",
    ]


def stem(task):
    return f"end-to-end-{task}"


def drawn_tasks(cells):
    return [
        task for task in TASKS if any(at[1] == task and "step_ms" in r for at, f in cells.items() for r in f.values())
    ]


def throughput_chart(cells, task, receipt):
    of_task = {at: found for at, found in cells.items() if at[1] == task}
    groups = [
        (
            f"{MODELS[model]}, {short_length(seqlen)}",
            {name: r["tokens_per_second"] / 1e3 for name, r in found.items() if "step_ms" in r},
        )
        for (model, _, seqlen), found in of_task.items()
    ]
    series = [
        (name, NAMES[name], COLOURS[name], "hollow" if name == "nothing" else "box")
        for name in CONTENDERS
        if any(name in values for _, values in groups)
    ]
    title = f"Training, {IN_WORDS[task]}: thousands of tokens per second"
    return charts.bar_chart(title, where(receipt), [g for g in groups if g[1]], series, "K tokens/s")


# --- Memory ------------------------------------------------------------------------------------------


def memory(topics):
    results, receipt = held(topics, "memory")
    lines = ["## Memory and the longest sequence", "", *paragraph(ABOUT_MEMORY)]
    found = {r["contender"]: r for r in results if "lengths" in r}
    if not found:
        return [*lines, *not_measured("memory"), *paper_split()]
    names = [name for name in CONTENDERS if name in found]
    return [
        *lines,
        f"{where(receipt)}.",
        "",
        "![Peak memory against length](img/gpu-end-to-end-memory.svg)",
        "",
        *markdown_table(
            ["", "longest that fits", "does not fit", "mask there"],
            [[NAMES[name], *longest_row(found[name])] for name in names],
        ),
        "",
        *(split_table(found["ours"]) if "ours" in found else []),
        *paper_split(),
    ]


ABOUT_MEMORY = (
    "Figures 4b and 7 and table 2 of the paper. SFT of the 1B model, one step at each length, doubled as long as it "
    "fits; then the gap is halved until it is a 16th of the length. Documents have 4K tokens each: memory does not "
    "depend on their lengths. A search has 150 s, FlexAttention's 300 s as it compiles for every length; some end "
    "before a length fails."
)


def longest_row(result):
    longest = result["longest"]
    failed = result["shortest_failed"]
    at = next((x for x in result["lengths"] if x["seqlen"] == longest and x["fits"]), None)
    untried = {"time": "not tried: too slow", "limit": "not tried"}.get(result["ended"], "another error")
    return [
        "none" if longest is None else f"{short_length(longest)}",
        untried if failed is None else short_length(failed),
        size_text(at["mask_bytes"]) if at else "",
    ]


def split_table(result):
    rows = [
        [
            short_length(x["seqlen"]),
            *(f"{x[name] / GIB:.2f}" for name in ("kept_bytes", "gradient_bytes", "forward_bytes")),
            f"{(x['peak_bytes'] - x['kept_bytes'] - x['forward_bytes']) / GIB:.2f}",
            f"{x['peak_bytes'] / GIB:.2f}",
            size_text(x["mask_bytes"]),
        ]
        for x in fitting(result)
    ]
    head = [
        "tokens",
        "weights and optimiser",
        "gradients",
        "kept by the forward",
        "above both at the peak",
        "peak",
        "mask",
    ]
    return ["Ours, GiB:", "", *markdown_table(head, rows), ""]


def paper_split():
    """The paper's table 2."""
    rows = [list(row.values()) for row in paper_tables.claims()["memory_7b"]]
    head = ["tokens, K", "weights and optimiser", "activations", "peak of one layer", "sum", "FlashMask"]
    return ["The paper's table 2: one of 32 GPUs that train the 7B model, GB:", "", *markdown_table(head, rows), ""]


def fitting(result):
    return sorted((x for x in result["lengths"] if x["fits"]), key=lambda x: x["seqlen"])


def memory_chart(results, receipt):
    """Peak memory at the lengths that were doubled."""
    found = {r["contender"]: r for r in results if "lengths" in r}
    peaks = {name: {x["seqlen"]: x["peak_bytes"] for x in fitting(r) if x["peak_bytes"]} for name, r in found.items()}
    first = min(seqlen for of in peaks.values() for seqlen in of)
    most = max(seqlen for of in peaks.values() for seqlen in of)
    lengths = [first * 2**n for n in range((most // first).bit_length())]
    series = [
        (NAMES[name], COLOURS[name], "dash" if name == "nothing" else "line", in_a_row(peaks[name], lengths))
        for name in CONTENDERS
        if peaks.get(name)
    ]
    return charts.log_chart(
        "Peak memory of training against length",
        where(receipt),
        lengths,
        series,
        "tokens",
        "bytes",
        short_length,
        size_text,
        "A line ends with the last doubled length that fits.",
    )


def in_a_row(peaks, lengths):
    """The values up to the first length without one."""
    values = []
    for seqlen in lengths:
        if seqlen not in peaks:
            break
        values.append(peaks[seqlen])
    return values


# --- Losses ------------------------------------------------------------------------------------------


def losses(topics):
    results, receipt = held(topics, "losses")
    lines = ["## Losses", "", *paragraph(ABOUT_LOSSES)]
    runs = runs_of(results)
    if not runs:
        return lines + not_measured("losses")
    rows = []
    for task, of_task in runs.items():
        ends = [f"{of_task[key][n]:.4f}" if key in of_task else "" for key, n in (("ours True", 0), ("ours True", -1))]
        pair = [of_task.get(key) for key in ("ours True", "dense True")]
        same = f"{sum(map(float.__eq__, *pair))} of {len(pair[1])}" if all(pair) else ""
        others = [f"{of_task[key][-1]:.4f}" if key in of_task else "" for key in ("ours False", "sdpa False")]
        rows.append([IN_WORDS[task], *ends, same, *others])
    head = ["", "first step", "last step", "steps with the dense mode's bits", "not deterministic", "SDPA, dense mask"]
    return [
        *lines,
        f"{where(receipt)}.",
        "",
        *markdown_table(head, rows),
        "",
        *(f"![Losses: {listed(shown)}](img/gpu-{name}.svg)" for name, shown in loss_pictures(runs)),
        "",
    ]


ABOUT_LOSSES = (
    "Figure 3 of the paper. 100 steps of the 1B model at 8K tokens, every step on another sequence. In deterministic "
    "mode the losses with skipping have to be those of our dense mode bit for bit, and so the trained weights. Beside "
    "them those without it, where dq is added in an arbitrary order, and those of PyTorch's SDPA under a dense mask."
)


def runs_of(results):
    """{task: {series: losses}}"""
    found = {}
    for task in TASKS:
        for r in results:
            if r["task"] == task and "losses" in r:
                found.setdefault(task, {})[f"{r['contender']} {r['deterministic']}"] = r["losses"]
    return found


# Pictures, each with an axis for losses of one size.
LOSS_PICTURES = {"end-to-end-losses": ("sft", "lora"), "end-to-end-preferences": ("dpo", "rm")}


def loss_pictures(runs):
    """[(file stem, tasks in words)] of those that there are."""
    found = [(name, [IN_WORDS[task] for task in tasks if task in runs]) for name, tasks in LOSS_PICTURES.items()]
    return [(name, tasks) for name, tasks in found if tasks]


def losses_charts(results, receipt):
    """{file stem: SVG}"""
    runs, made = runs_of(results), {}
    for name, tasks in LOSS_PICTURES.items():
        if panels := [(IN_WORDS[task], runs[task]) for task in tasks if task in runs]:
            series = [s for s in LOSS_SERIES if any(s[0] in of_task for _, of_task in panels)]
            title = "Losses with and without skipping"
            made[name] = charts.line_panels(title, where(receipt), panels, series, "step", "loss")
    return made


# --- Sparsity ----------------------------------------------------------------------------------------


def sparsity(topics):
    results, receipt = held(topics, "sparsity")
    found = [r for r in results if "points" in r]
    lines = ["## Kernel time against sparsity", "", *paragraph(ABOUT_SPARSITY)]
    if not found:
        return lines + not_measured("sparsity")
    for r in found:
        rows = [
            [f"{percent(low)} to {percent(high)}", count, "" if ms is None else ms_text(ms)]
            for low, high, count, ms in bins(r["points"])
        ]
        lines += [f"{sequences_text(r)}:", "", *markdown_table(["sparsity", "sequences", "ms"], rows), ""]
    picture = "![Kernel time against sparsity](img/gpu-end-to-end-sparsity.svg)"
    return [*lines, picture, "", f"{where(receipt)}.", ""]


ABOUT_SPARSITY = (
    "Figure 6 of the paper: the 240 sequences of each task at 32K, in ten bins of equal width by the share of empty "
    "128 x 128 tiles, with the time of our kernels, forward and backward (32 heads, d = 128, bfloat16). LoRA trains on "
    "SFT's. Figure 4a, the forward over masks that fill the bins evenly, is [elsewhere]"
    "(performance/measurements.md#time-against-sparsity)."
)


def sequences_text(r):
    tokens = f"{short_length(r['seqlen'])} tokens, {r['heads']} heads, d = {r['head_dim']}"
    return f"{IN_WORDS[r['task']]}, {len(r['points'])} sequences of {tokens}"


def sparsity_chart(results, receipt):
    kinds = [("sft", IN_WORDS["sft"], COLOURS["ours"]), ("dpo", IN_WORDS["dpo"], COLOURS["flex"])]
    kinds.append(("rm", IN_WORDS["rm"], COLOURS["varlen"]))
    points = [
        (r["task"], share, ms, f"{IN_WORDS[r['task']]}: sparsity {share:.3f}, {ms:.2f} ms")
        for r in results
        for share, ms in r.get("points", [])
    ]
    return charts.scatter_chart(
        "Kernel time of the sequences trained on, forward and backward",
        where(receipt),
        points,
        kinds,
        "share of 128 x 128 tiles that are empty",
        "ms",
    )


# --- Claims and bars ---------------------------------------------------------------------------------


def claims(cases, topics):
    """The paper's claims beside what was found here."""
    said = paper_tables.claims()["claims"]
    results, _ = held(topics, "throughput")
    dense = [over_ours(found, "sdpa") for found in cells_of(results).values()]
    flex = [over_ours(found, "flex") for found in cells_of(results).values()]
    longest = {r["contender"]: r["longest"] for r in held(topics, "memory")[0] if r.get("longest")}
    ours = short_length(longest["ours"]) if "ours" in longest else ""
    matrix = max((longest[name] for name in QUADRATIC if name in longest), default=None)
    matched = [c for c in checks_of(topics, "losses") if "bit" in c["name"]]
    same = f"{sum(c['passed'] for c in matched)} of {len(matched)} comparisons" if matched else ""
    spans = end_to_end_kernels.spans(cases)
    rows = [
        ["training over a dense mask", span_text(said["speedup"]), span_text(dense)],
        ["training over FlexAttention", "–", span_text(flex)],
        [
            "longest sequence; with a dense mask",
            f"{said['longest_lora_7b']['ours']}K; {said['longest_lora_7b']['dense']}K (7B LoRA, 32 GPUs)",
            f"{ours}; {short_length(matrix)} (1B SFT, one GPU)" if ours and matrix else ours,
        ],
        ["losses, with and without skipping, deterministic", "the same bits", same],
        ["kernels over FlexAttention, d = 128", span_text(said["kernel_over_flex_d128"]), span_text(spans[128])],
        ["kernels over FlexAttention, d = 64", span_text(said["kernel_over_flex_d64"]), span_text(spans[64])],
    ]
    shown = [[*row[:2], row[2] or "not measured yet"] for row in rows]
    return ["## The paper's claims", "", *markdown_table(["", "paper (A100, A800)", "here"], shown), ""]


def span_text(values):
    values = [v for v in values if v]
    return f"{min(values):.2f}x to {max(values):.2f}x" if values else ""


def bars(topics):
    rows = [
        [c["name"], f"{c['got']:.3f}", f"{'at most' if c.get('most') else 'at least'} {c['bar']:.4g}", verdict_of(c)]
        for name in FIGURES
        for c in checks_of(topics, name)
    ]
    lines = ["## What was to be reached", ""]
    return [*lines, *markdown_table(["", "reached", "asked", ""], rows), ""] if rows else []


def verdict_of(checked):
    return "yes" if checked["passed"] else "**no**"


# --- What is left out ---------------------------------------------------------------------------------

FLASH_ATTENTION = "[FlashAttention](https://arxiv.org/abs/2205.14135)"
NOT_HERE = {
    "Llama 2 of 7B, 13B and 70B on 32 GPUs (figure 2)": (
        "FlashMask",
        "They need several machines and tensor, pipeline and sharded parallelism around attention. Models of 1B to 8B "
        "on one GPU are here, with the same tasks and masks.",
    ),
    "losses on Tulu 2 and UltraFeedback with trained weights": (
        "FlashMask",
        "The trainings here need neither data sets nor trained weights. Their losses show that skipping changes no "
        "bit, not how good a model becomes.",
    ),
    "tiles within the chunks of linear RNNs, TFLA": (
        "follow-ups of FlashMask",
        "Their gated products have no softmax, so they are another kernel. Only the masks would be the same.",
    ),
    "BERT-large and GPT-2, trained to a given quality": (
        "FlashAttention",
        "They take days on eight GPUs, and their data sets. Attention is exact here as there, so the quality that a "
        "model reaches is its own.",
    ),
    "the long-range arena, Path-X and Path-256, MIMIC-III and ECtHR": (
        "FlashAttention",
        "They ask what a model learns from longer sequences, not how fast attention is; they need their data sets.",
    ),
    "RTX 3090 and T4": (
        "FlashAttention",
        "Neither was measured. A T4, of compute capability 7.5, is older than what the kernels take.",
    ),
    "Apex FMHA": (
        "FlashAttention",
        "It takes at most 512 tokens and is superseded by FlashAttention itself, versions 2 and 3 of which are "
        "measured here.",
    ),
    "Reformer, Local Attention, Linformer, Smyrf, LSFormer, Performer; Longformer and BigBird": (
        "FlashAttention",
        "The first six compute something else than softmax attention, so a time beside theirs says nothing about a "
        "kernel. Windows with global tokens, as Longformer has them, are a mask here and measured as such; BigBird's "
        "random blocks go into a block mask.",
    ),
    "block-sparse FlashAttention with a butterfly pattern": (
        "FlashAttention",
        "Any pattern of 128 x 128 blocks is a mask here, measured on random ones "
        "([block masks](performance/measurements.md#block-masks)); no model was trained with one.",
    ),
}


def not_here():
    about = (
        f"The FlashMask and {FLASH_ATTENTION} papers, and work that builds on them, have trainings and comparisons "
        "that this project has not rebuilt. [Another page](performance.md#what-was-not-measured) lists what was not "
        "measured of the kernels."
    )
    rows = [[what, source, why] for what, (source, why) in NOT_HERE.items()]
    return ["## What of the papers is not here", "", *paragraph(about), *markdown_table(["", "paper", "why"], rows)]


# --- The page ----------------------------------------------------------------------------------------


def page(cases, topics, command):
    """docs/end-to-end.md."""
    lines = [
        f"<!-- Written by `{command}`: edits here are lost. -->",
        "# Training end to end",
        "",
        *paragraph(
            "The results of the FlashMask paper ([arXiv:2410.01359](https://arxiv.org/abs/2410.01359)) rebuilt on one "
            "GPU, with models of transformers whose attention is chosen by name ([how](python/hugging-face.md)). Every "
            "figure is printed from a receipt in [benchmarks/results](../benchmarks/results). "
            "[How it is measured](../benchmarks/README.md#end-to-end)."
        ),
        "```",
        *(f"scripts/gpu-check end-to-end {name}" for name in (*FIGURES, "tables")),
        "```",
        "",
        *claims(cases, topics),
        *bars(topics),
        *throughput(topics),
        *memory(topics),
        *losses(topics),
        *sparsity(topics),
        *end_to_end_kernels.section(cases),
        *not_here(),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def drawings(topics):
    """{file stem: SVG} of what was measured."""
    made = {}
    results, receipt = held(topics, "throughput")
    cells = cells_of(results)
    made |= {stem(task): throughput_chart(cells, task, receipt) for task in drawn_tasks(cells)}
    results, receipt = held(topics, "losses")
    made |= losses_charts(results, receipt)
    for name, draw, field in (("memory", memory_chart, "lengths"), ("sparsity", sparsity_chart, "points")):
        results, receipt = held(topics, name)
        if any(field in r for r in results):
            made[f"end-to-end-{name}"] = draw(results, receipt)
    return made
