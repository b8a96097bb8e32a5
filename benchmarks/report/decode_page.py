# SPDX-License-Identifier: Apache-2.0
"""The page of decode over KV caches on a GPU, from the receipt decode.json."""

from statistics import geometric_mean

from benchmarks.measure.gpu import decode_bars, decode_shapes
from benchmarks.measure.gpu.decode_bars import PEERS, best
from benchmarks.report.markdown import listed, markdown_table, paragraph, percent, range_text

CELLS = "../../benchmarks/results/decode.json"
MASKS = {
    "ours": "causal",
    "tree": "a tree of 8 drafts",
    "tail": "its bits alone",
    "window": "a window of 1,024",
    "evicted": "90 % of blocks evicted",
}


def head(run, held):
    versions = [f"{PEERS[name]} {version}" for name, version in held["versions"].items()]
    software = ", ".join([f"PyTorch {run['torch']}", *versions])
    return paragraph(
        f"One new row a request over bfloat16 caches ({run['date']}, {run['device']}; {software}), beside "
        f"{listed(list(PEERS.values()))} where they take a shape. Caches are rotated past L2, calls replayed from CUDA "
        "graphs, contenders in another order each round. [How it works, and what was tried](../kernels/decode.md); "
        f"[every cell]({CELLS})."
    )


def means(cells):
    """Each peer's time over ours, where it took part."""
    for name, said in PEERS.items():
        found = [cell["over_ours"][name] for cell in cells if name in cell["over_ours"]]
        if found:
            yield f"{said}'s {geometric_mean(found):.3f} ({len(found)} cells)"


def summary(cells):
    judged = [cell for cell in cells if cell["page"] in decode_bars.PAGES and best(cell) is not None]
    lines = []
    if judged:
        worst = min(judged, key=best)
        small = [best(cell) for cell in judged if cell["mb"] < decode_bars.MEAN_BELOW_MB]
        below = f", and {geometric_mean(small):.3f} below {decode_bars.MEAN_BELOW_MB} MB" if small else ""
        lines += paragraph(
            f"Times over ours at pages of {listed([str(page) for page in decode_bars.PAGES])} keys, by geometric mean: "
            f"{listed(list(means(judged)))}. That of the best peer of each cell is "
            f"{geometric_mean(map(best, judged)):.3f}{below}. The weakest cell is {worst['cell']}: {best(worst):.2f}."
        )
    return lines + stream_text([cell for cell in cells if "stream_share" in cell])


def stream_text(cells):
    if not cells:
        return []
    shares, rates = ([cell[key] for cell in cells] for key in ("stream_share", "gb_per_s"))
    return paragraph(
        f"Cells of 1 GB and more read {min(rates):,.0f} to {max(rates):,.0f} GB/s, {percent(min(shares))} to "
        f"{percent(max(shares))} of what a kernel that only reads got in the same rounds."
    )


def text_of(cell):
    over = best(cell)
    return f"{cell['us']['ours']:.1f}" + (f" ({over:.2f})" if over else "")


def tables(cells):
    """Shapes by models, a table for each page size."""
    found = {cell["cell"]: cell for cell in cells}
    sizes = list(dict.fromkeys((cell["batch"], cell["keys"]) for cell in cells))
    models = list(dict.fromkeys((cell["heads_q"], cell["heads_kv"], cell["dim"]) for cell in cells))
    names = [f"{q}/{kv} d={dim}" for q, kv, dim in models]
    for page in decode_shapes.PAGES:
        rows = []
        for size in sizes:
            own = [found.get(decode_shapes.Shape(*size, *model).name(page)) for model in models]
            rows.append([f"{size[0]} x {size[1]}", *(text_of(cell) if cell else "" for cell in own)])
        yield [*markdown_table([f"page {page}, us (the best peer's time over ours)", *names], rows), ""]


def layouts(cells):
    """Other layouts beside pages of 64."""
    by_page = {page: [c for c in cells if c["page"] == page and "over_64" in c] for page in (16, 1, 0)}
    if not by_page[1]:
        return []
    sixteen = f"Pages of 16 run at {range_text([c['over_64'] for c in by_page[16]])} of the speed of pages of 64. "
    rows = [[c["cell"], text_of(c), f"{c['over_64']:.2f}"] for page in (1, 0) for c in by_page[page]]
    return [
        *paragraph((sixteen if by_page[16] else "") + "Other layouts, in the same rounds:"),
        *markdown_table(["", "us (the best peer's time over ours)", "speed over pages of 64"], rows),
        "",
    ]


def mask_name(name):
    peer, _, of_tree = name.partition("_")
    return MASKS.get(name) or PEERS[peer] + (", the tree" if of_tree else ", causal")


def others(held):
    for row in held["masks"]:
        yield from ([f"{row['cell']}: {mask_name(name)}", f"{us:.1f}"] for name, us in row["us"].items())
    for row in held["updates"]:
        yield [f"`plan.update`, {row['update']}", f"{row['us']:.1f}"]
        if "host_us" in row:
            yield [f"the host's time of it, {row['update']}", f"{row['host_us']:.1f}"]
    for row in held["host"]:
        name = PEERS.get(row["contender"], "ours")
        yield [f"the host's time of a call, {name}", f"{row['us']:.1f}"]


def float8(rows):
    """Caches of e4m3 beside peers over such caches, and our own in bfloat16."""
    if not rows:
        return []
    names = [name for name in PEERS if any(name in row["us"] for row in rows)]
    titles = ["", "a scale for all", "for each token and head", "bfloat16", *(PEERS[name] for name in names)]
    cells = [[row["cell"], *(us_of(row, name) for name in ("ours", "by_token", "bf16", *names))] for row in rows]
    said = "Float8 (e4m3) caches by kernels of mma.sync, in microseconds. FlashAttention-3's queries are float8, too."
    return [*paragraph(said), *markdown_table(titles, cells), ""]


def us_of(row, name):
    return f"{row['us'][name]:.1f}" if name in row["us"] else ""


def invariance(rows):
    """batch_invariant beside the fast call."""
    if not rows:
        return []
    default, one_split = decode_bars.DEFAULT_SPLIT, [row for row in rows if "fa3_one_split" in row["us"]]
    mean = geometric_mean(row["us"]["ours"] / row["us"][default] for row in rows)
    said = f"`batch_invariant` runs at {mean:.2f} of the fast call's speed on average, with `split_size` {default}."
    for row in one_split:
        over = row["us"]["fa3_one_split"] / row["us"][default]
        said += f" It is {over:.1f} times as fast as FlashAttention-3 without splits at {row['cell']}."
    sizes = sorted((name for name in rows[0]["us"] if name.isdecimal()), key=int)
    cells = [[row["cell"], *(us_of(row, name) for name in ("ours", *sizes))] for row in rows]
    return [*paragraph(said), *markdown_table(["us", "fast", *(f"splits of {size}" for size in sizes)], cells), ""]


def forests(topics):
    """Forests beside the plain call; none of it without their receipt."""
    if "forests" not in topics:
        return []
    run = topics["forests"]
    titles = ["us", "of which shared keys", "plain", "as a forest", "rows in its order", "its update"]
    names = "ours", "forest", "in_order", "update", "cascade"
    rows = run["figures"]["forests"]["cells"]
    cells = [[row["cell"], row["shared"], *(us_of(row, name) for name in names)] for row in rows]
    said = (
        f"Requests that begin with the same pages, as a [forest](../inference.md#shared-prefixes) ({run['date']}, "
        f"{run['device']}; `scripts/gpu-check forests`):"
    )
    return [*paragraph(said), *markdown_table([*titles, "FlashInfer, two levels"], cells), ""]


SERVED = {
    "ours": "flashmask",
    "sdpa": "`sdpa`",
    "eager": "`paged\\|eager`",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
}


def serving(topics):
    """transformers' continuous batching; none of it without its receipt."""
    if "serving" not in topics:
        return []
    run, held = topics["serving"], topics["serving"]["figures"]["serving"]
    said = (
        f"Continuous batching of transformers {held['transformers']}, {held['requests']} requests at once to a random "
        f"bfloat16 Llama of {held['model']['num_hidden_layers']} layers and {held['model']['hidden_size']} dimensions, "
        f"with {held['prompt_tokens']:,} tokens of prompts and {held['answer_tokens']} of each answer ({run['date']}, "
        f"{run['device']}; `scripts/gpu-check serving`). With random weights the answers depend on rounding: "
        "they differ from the first token on whose best two logits are closer than that."
    )
    rows = [
        [
            SERVED[cell["contender"]],
            f"{cell['tokens_per_s']:,.0f}",
            f"{cell['ours_over']:.2f}" if "ours_over" in cell else "",
            percent(cell["agreement"]) if "agreement" in cell else "",
        ]
        for cell in held["cells"]
    ]
    titles = ["attention", "tokens/s", "ours over it", "tokens alike"]
    left_out = [f"{SERVED[name]} did not take part: {why}." for name, why in held["left_out"].items()]
    table = markdown_table(titles, rows)
    return [
        "## Continuous batching",
        "",
        *paragraph(said),
        *table,
        "",
        *(paragraph(" ".join(left_out)) if left_out else ()),
    ]


def mma_sync(run, cells):
    """The kernels of mma.sync beside FlashInfer's."""
    large = [cell for cell in cells if cell["mb"] >= decode_bars.MMA_SYNC_MB and "flashinfer" in cell["over_ours"]]
    if not large:
        return []
    overs = [cell["over_ours"]["flashinfer"] for cell in large]
    said = (
        f"The kernels of [mma.sync](../kernels/sm80.md#decode), which other GPUs run, on the same card ({run['date']}, "
        f"{run['device']}): FlashInfer's time over ours is {geometric_mean(overs):.3f} on average in the {len(large)} "
        f"cells that read {decode_bars.MMA_SYNC_MB} MB or more, {range_text(overs)} in each."
    )
    return paragraph(said)


def lines(topics):
    """None of it without a receipt."""
    if "decode" not in topics:
        return []
    run, held = topics["decode"], topics["decode"]["figures"]["decode"]
    other = topics.get("decode-sm80")
    return [
        *head(run, held),
        *summary(held["cells"]),
        *(line for table in tables(held["cells"]) for line in table),
        *layouts(held["cells"]),
        *float8(held.get("float8", ())),
        *invariance(held.get("invariance", ())),
        *forests(topics),
        *(mma_sync(other, other["figures"]["decode"]["cells"]) if other else ()),
        *markdown_table(["", "us"], list(others(held))),
    ]
