# SPDX-License-Identifier: Apache-2.0
"""The section about prefill and verification of the page of decode, from the receipt prefill.json."""

from benchmarks.measure.gpu.prefill_bars import NAMES
from benchmarks.report.markdown import markdown_table, paragraph

CELLS = "../../benchmarks/results/prefill.json"
COLUMNS = {"ours": "ours", **NAMES, "1024": "splits of 1,024", "4096": "of 4,096"}
OTHERS = {"tree": "a random tree", "fa3": "FlashAttention-3, causal", "flex": "FlexAttention without pages"}
OTHERS |= {"ours": "ours", "causal": "ours, causal", "flashinfer": "FlashInfer, causal"}
OTHERS |= {"flashinfer_tree": "FlashInfer, the tree", "xqa": "XQA, causal", "xqa_tree": "XQA, the tree"}
OTHERS |= {"vllm_triton": "vLLM's Triton kernel"}


def chunks(rows):
    names = [name for name in COLUMNS if any(name in row["us"] for row in rows)]
    cells = [
        [
            row["cell"],
            f"{row['tflops']:.0f}",
            *(f"{row['us'][name]:.0f}" if name in row["us"] else "" for name in names),
        ]
        for row in rows
    ]
    return markdown_table(["us, causal", "TFLOP/s", *(COLUMNS[name] for name in names)], cells)


FLOAT8 = {"ours": "a scale for all", "by_token": "for each token and head", "bf16": "bfloat16", "fa3": NAMES["fa3"]}


def float8(rows):
    """Caches of e4m3 beside our own in bfloat16, and a peer over e4m3."""
    if not rows:
        return []
    said = "Float8 (e4m3) caches by the same kernels. FlashAttention-3's queries are float8, too."
    cells = [
        [row["cell"], f"{row['tflops']:.0f}", *(f"{row['us'][n]:.0f}" if n in row["us"] else "" for n in FLOAT8)]
        for row in rows
    ]
    return [*paragraph(said), *markdown_table(["us, causal", "TFLOP/s", *FLOAT8.values()], cells), ""]


def lines(topics):
    """None of it without a receipt."""
    if "prefill" not in topics:
        return []
    run, held = topics["prefill"], topics["prefill"]["figures"]["prefill"]
    said = (
        f"## Prefill and verification\n\nRows that are the last of their keys ({run['date']}, {run['device']}; PyTorch "
        f"{run['torch']}), beside our own forward on contiguous tensors and, where they took part, other kernels over "
        f"the same caches; splits are those of `batch_invariant`. [Every figure]({CELLS})."
    )
    rows = [*held["drafts"], *held["images"]]
    kinds = {True: "64 drafts of each request", False: "four images among text"}
    others = [
        [f"{row['cell']}: {kinds['tree' in row['us']]}, {OTHERS[name]}", f"{us:.1f}"]
        for row in rows
        for name, us in row["us"].items()
    ]
    heading, _, text = said.partition("\n\n")
    return [
        *(heading, "", *paragraph(text), *chunks(held["chunks"]), ""),
        *float8(held.get("float8", ())),
        *(*markdown_table(["", "us"], others), ""),
    ]
