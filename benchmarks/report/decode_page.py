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
        "graphs, contenders shuffled every round. [How it works, and what was tried](../kernels/decode.md); "
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
    yield from ([f"`plan.update`, {row['update']}", f"{row['us']:.1f}"] for row in held["updates"])
    for row in held["host"]:
        name = PEERS.get(row["contender"], "ours")
        yield [f"the host's time of a call, {name}", f"{row['us']:.1f}"]


def lines(topics):
    """None of it without a receipt."""
    if "decode" not in topics:
        return []
    run, held = topics["decode"], topics["decode"]["figures"]["decode"]
    return [
        *head(run, held),
        *summary(held["cells"]),
        *(line for table in tables(held["cells"]) for line in table),
        *layouts(held["cells"]),
        *markdown_table(["", "us"], list(others(held))),
    ]
