# SPDX-License-Identifier: Apache-2.0
"""The page of decode over paged caches until it has a receipt: benchmarks/data/decode.json."""

import json
from statistics import geometric_mean

from benchmarks import DATA
from benchmarks.report.markdown import markdown_table, paragraph

HELD = DATA / "decode.json"
SMALL_MB, LARGE_MB = 300, 2000


def mean(cells):
    return f"{geometric_mean(cell['fa3_over_ours'] for cell in cells):.3f}"


def summary(held, cells):
    by_dim = {dim: [c for c in cells if f"d={dim} " in c["cell"]] for dim in (64, 128, 256)}
    worst = min(cells, key=lambda c: c["fa3_over_ours"])
    large = [c["gb_per_s"] for c in cells if c["MB"] >= LARGE_MB]
    dims = ", ".join(f"{mean(own)} at d = {dim}" for dim, own in by_dim.items())
    return paragraph(
        f"FA3's time over ours is {mean(cells)} in the geometric mean of {len(cells)} cells: {dims}, and "
        f"{mean([c for c in cells if c['MB'] < SMALL_MB])} below {SMALL_MB} MB. The weakest is {worst['cell']}: "
        f"{worst['fa3_over_ours']:.2f}. Cells of 2 GB and more read {min(large):,.0f} to {max(large):,.0f} GB/s."
    )


def tables(cells):
    found = {cell["cell"]: cell for cell in cells}
    shapes = list(dict.fromkeys(name.split(", ")[0] for name in found))
    models = list(dict.fromkeys(name.split(", ")[1].split(" page")[0] for name in found))
    for page in (64, 16):
        rows = []
        for shape in shapes:
            own = [found[f"{shape}, {model} page {page}"] for model in models]
            rows.append([shape, *(f"{c['ours_us']:.1f} ({c['fa3_over_ours']:.2f})" for c in own)])
        yield [*markdown_table([f"page {page}, us (FA3's time over ours)", *models], rows), ""]


def others(rows):
    for row in rows:
        if "fa3_us" in row:
            continue
        if "cell" not in row:
            name = "the host's time of a call" if "host" in row else f"`plan.update`, {row['plan.update']}"
            yield [name, f"{row['us']:.1f}"]
            continue
        names = {
            "ours": "causal",
            "tree": "a tree of 8 drafts",
            "tail": "its bits alone",
            "window": "a window of 1,024",
        }
        names["evicted"] = "90 % of blocks evicted"
        for key, said in names.items():
            if f"{key}_us" in row:
                yield [f"{row['cell']}: {said}", f"{row[f'{key}_us']:.1f}"]


def lines():
    held = json.loads(HELD.read_text())
    cells = [row for row in held["rows"] if "fa3_us" in row]
    return [
        *paragraph(
            f"One new row a request over bfloat16 caches on an {held['gpu']}, beside {held['peer']}. "
            "Caches are rotated past L2, calls replayed from CUDA graphs, contenders shuffled every round. "
            "[How it works, and what was tried](../kernels/decode.md); "
            "[every cell](../../benchmarks/data/decode.json)."
        ),
        *summary(held, cells),
        *(line for table in tables(cells) for line in table),
        *markdown_table(["", "us"], list(others(held["rows"]))),
    ]
