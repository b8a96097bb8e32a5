# SPDX-License-Identifier: Apache-2.0
"""The bars of decode over KV caches. Ratios are speed, their time over ours, unless said otherwise."""

from statistics import geometric_mean

from benchmarks.cell_bars import check, check_at_most

PEERS = {"fa3": "FlashAttention-3", "flashinfer": "FlashInfer", "xqa": "XQA"}
# Speed over the best peer at these pages: each cell, each cell that reads little, and the geometric mean of cells below
# a size.
PAGES = (64, 16)
EACH, SMALL_MB, EACH_SMALL = 0.95, 10, 0.90
MEAN, MEAN_BELOW_MB = 1.0, 300
STREAM, LARGE_MB = 0.97, 1000  # share of the card's stream, of cells that read so much
OVER_64 = {16: 0.98, 1: 0.95}  # the same shape's time at pages of 64 over that at these
TREE, TREE_OVER = 1.05, {"flashinfer": 2.4, "xqa": 1.0}  # a tree's time over causal attention's; over peers' trees
SHARE_FACTOR, SHARE_US = 1.2, 6  # of a mask that leaves few blocks: its share of the whole time, and microseconds more
# plan.update in microseconds, and with vectors the time of their bytes at a share of the stream more
UPDATES, VECTORS_OF_STREAM = {"64 x 8192": 6, "256 x 32768": 12, "4096 x 128": 40}, 0.7
HOST_US, UPDATE_HOST_US = 25, 15  # of a call, and of plan.update
# Kernels of mma.sync over FlashInfer's, in cells that read so much.
MMA_SYNC, MMA_SYNC_MB, MMA_SYNC_OVER = "sm80", 100, 1.0
# A float8 cache: speed over a bfloat16 one, over the best peer's, and the time of a scale for each token and head.
FLOAT8_OVER_BF16, FLOAT8_OVER_PEERS, BY_TOKEN = {"64 x 8192": 1.72}, 1.05, 1.03
# batch_invariant: speed over the fast call, on average and in some cells, and over FlashAttention-3 without splits.
INVARIANT_MEAN, INVARIANT, OVER_ONE_SPLIT = 0.90, {"1 x 8192": 0.75, "1 x 1024": 0.55}, 6
DEFAULT_SPLIT = "1024"


def best(cell):
    """The best peer's time over ours; None where none took part."""
    found = [ratio for name, ratio in cell["over_ours"].items() if name in PEERS]
    return min(found, default=None)


def of_cell(cell):
    """The bars of one cell, as cell_bars.check has them."""
    if is_mma_sync(cell):
        return of_mma_sync(cell)
    found, name = [], cell["cell"]
    if cell["page"] in PAGES and (over := best(cell)) is not None:
        small = cell["mb"] < SMALL_MB
        what = f"cells below {SMALL_MB} MB over the best peer" if small else "cells over the best peer"
        found.append(check(f"{name}: {what}", over, EACH_SMALL if small else EACH))
    if cell.get("stream_share") is not None:
        found.append(check(f"{name}: share of the stream", cell["stream_share"], STREAM))
    if cell["page"] in OVER_64 and cell.get("over_64") is not None:
        found.append(check(f"{name}: page {cell['page']} over 64", cell["over_64"], OVER_64[cell["page"]]))
    return found


def is_mma_sync(cell):
    return cell.get("kernel", "").startswith(MMA_SYNC)


def of_mma_sync(cell):
    over = cell["over_ours"].get("flashinfer")
    if over is None or cell["mb"] < MMA_SYNC_MB:
        return []
    return [check(f"{cell['cell']}: cells of {MMA_SYNC_MB} MB and more over FlashInfer", over, MMA_SYNC_OVER)]


def of_float8(row):
    name, over, us, found = row["cell"], row["over_ours"], row["us"], []
    for size, bar in FLOAT8_OVER_BF16.items():
        if name.startswith(f"{size},"):
            found.append(check(f"{name}: float8 over bfloat16", over["bf16"], bar))
    if (peer := best(row)) is not None:
        found.append(check(f"{name}: float8 over the best peer", peer, FLOAT8_OVER_PEERS))
    return [*found, check_at_most(f"{name}: a scale for each token and head", us["by_token"] / us["ours"], BY_TOKEN)]


def of_invariance(rows):
    speeds = {row["cell"]: row["us"]["ours"] / row["us"][DEFAULT_SPLIT] for row in rows}
    if not speeds:
        return []
    found = [
        check("batch_invariant over the fast call, geometric mean", geometric_mean(speeds.values()), INVARIANT_MEAN)
    ]
    for size, bar in INVARIANT.items():
        each = [(name, speed) for name, speed in speeds.items() if name.startswith(f"{size},")]
        found += [check(f"{name}: batch_invariant over the fast call", speed, bar) for name, speed in each]
    for us in (row["us"] for row in rows if "fa3_one_split" in row["us"]):
        over = us["fa3_one_split"] / us[DEFAULT_SPLIT]
        found.append(check("batch_invariant over FlashAttention-3 without splits", over, OVER_ONE_SPLIT))
    return found


def of_mean(cells):
    """The bar of all cells below a size together."""
    cells = [cell for cell in cells if not is_mma_sync(cell)]
    found = [best(cell) for cell in cells if cell["mb"] < MEAN_BELOW_MB and cell["page"] in PAGES]
    found = [over for over in found if over is not None]
    if not found:
        return []
    name = f"decode: geometric mean below {MEAN_BELOW_MB} MB over the best peer"
    return [check(name, geometric_mean(found), MEAN, f"{len(found)} cells")]


def of_mask(row):
    """The bars of masks: {"cell", "us", "live"}, with causal attention as `ours`."""
    us, name, found = row["us"], row["cell"], []
    if "tree" in us:
        found.append(check_at_most(f"{name}: a tree's time over causal attention's", us["tree"] / us["ours"], TREE))
        for peer, bar in TREE_OVER.items():
            if f"{peer}_tree" in us:
                found.append(check(f"{name}: a tree over {PEERS[peer]}'s", us[f"{peer}_tree"] / us["tree"], bar))
    for mask, share in row.get("live", {}).items():
        most = SHARE_FACTOR * share * us["ours"] + SHARE_US
        found.append(check_at_most(f"{name}: {mask}, its time over what its blocks allow", us[mask] / most, 1))
    return found


def of_update(row, stream):
    """The bars of one plan.update. `stream`: GB/s."""
    size = row["update"].split(",")[0]
    if size not in UPDATES or (row["vector_mb"] and not stream):
        return []
    most = UPDATES[size] + (row["vector_mb"] * 1e3 / (VECTORS_OF_STREAM * stream) if row["vector_mb"] else 0)
    found, name = [], f"plan.update {row['update']}"
    found.append(check_at_most(f"{name}, {most:.1f} us: an update's time over its aim", row["us"] / most, 1))
    if "host_us" in row:
        found.append(check_at_most(f"{name}: microseconds of the host", row["host_us"], UPDATE_HOST_US))
    return found


def of_all(figures):
    """All bars of a receipt's figures."""
    each = [found for cell in figures["cells"] for found in of_cell(cell)]
    masks = [found for row in figures["masks"] for found in of_mask(row)]
    stream = max(figures["stream_gb_per_s"].values(), default=None)
    updates = [found for row in figures["updates"] for found in of_update(row, stream)]
    host = [row["us"] for row in figures["host"] if row["contender"] == "ours"]
    own = [check_at_most("microseconds of the host in a call", us, HOST_US) for us in host]
    narrow = [found for row in figures.get("float8", ()) for found in of_float8(row)]
    invariant = of_invariance(figures.get("invariance", ()))
    return each + of_mean(figures["cells"]) + masks + updates + own + narrow + invariant
