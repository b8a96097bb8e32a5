# SPDX-License-Identifier: Apache-2.0
"""The bars of prefill and verification over KV caches. Ratios are speed, their time over ours."""

from statistics import geometric_mean

from benchmarks.cell_bars import check, check_at_most

# Chunks of rows: over our own forward on contiguous tensors, and over peers.
OVER_OTHERS = {"contiguous": 0.96, "fa3": 0.95, "flashinfer": 2.0}
NAMES = {"contiguous": "our contiguous forward", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer", "xqa": "XQA"}
NAMES |= {"flex": "FlexAttention", "vllm_triton": "vLLM's Triton kernel"}
# Drafts: causal over FlashAttention-3, a tree's time over causal, and a tree over peers' trees.
DRAFTS_OVER, TREE = {"fa3": 0.97}, 1.05
TREE_OVER = {"flashinfer": 4.5, "xqa": 3.3}
# batch_invariant over the fast call, by split_size.
INVARIANT = {"1024": 0.85, "4096": 0.88}
IMAGES_OVER = {"flex": 2.5, "vllm_triton": 2.0}


def of_chunk(row):
    name, found = row["cell"], []
    for other, bar in OVER_OTHERS.items():
        if other in row["over_ours"]:
            found.append(check(f"{name}: over {NAMES[other]}", row["over_ours"][other], bar))
    return found


def of_drafts(row):
    us, name, found = row["us"], row["cell"], []
    for peer, bar in DRAFTS_OVER.items():
        if peer in us:
            found.append(check(f"{name}: over {NAMES[peer]}", us[peer] / us["ours"], bar))
    if "tree" in us:
        found.append(check_at_most(f"{name}: a tree's time over causal attention's", us["tree"] / us["ours"], TREE))
        for peer, bar in TREE_OVER.items():
            if f"{peer}_tree" in us:
                found.append(check(f"{name}: a tree over {NAMES[peer]}'s", us[f"{peer}_tree"] / us["tree"], bar))
    return found


def of_images(row):
    us, name = row["us"], row["cell"]
    return [
        check(f"{name}: images over {NAMES[peer]}", us[peer] / us["ours"], bar)
        for peer, bar in IMAGES_OVER.items()
        if peer in us
    ]


def of_invariance(rows):
    found = []
    for size, bar in INVARIANT.items():
        speeds = [row["us"]["ours"] / row["us"][size] for row in rows if size in row["us"]]
        if speeds:
            name = f"prefill: batch_invariant with split_size {size} over the fast call, geometric mean"
            found.append(check(name, geometric_mean(speeds), bar))
    return found


def of_all(figures):
    """All bars of a receipt's figures."""
    each = {"chunks": of_chunk, "drafts": of_drafts, "images": of_images}
    found = [bar for name, bars in each.items() for row in figures[name] for bar in bars(row)]
    return found + of_invariance(figures["chunks"])
