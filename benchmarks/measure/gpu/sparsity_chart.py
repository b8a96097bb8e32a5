# SPDX-License-Identifier: Apache-2.0
"""Latency against block sparsity as a chart: figure 4a of the paper."""

from benchmarks import charts
from benchmarks.receipts import short_length

KINDS = [
    ("causal_document", "causal document", charts.OURS),
    ("shared_question", "shared question", charts.FLEX),
    ("document", "document", charts.CUDNN),
]


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
