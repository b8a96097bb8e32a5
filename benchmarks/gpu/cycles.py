# SPDX-License-Identifier: Apache-2.0
"""Cycles, instructions and memory traffic of the attention kernels, counted by Nsight Compute (ncu), which holds the card's clock.

The time of a kernel that power limits varies with the card, its temperature and what ran before; these counts repeat to some tenths of a
percent, so they tell small changes of a kernel apart. What they do not show is power: fewer cycles at a held clock are not always less time.
FLASHMASK_LIBRARY names the library; run it once with each of the libraries that are compared.
"""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import paper_masks  # noqa: E402

SEQLEN, HIDDEN = 8192, 4096
KERNELS = {"fwd": "forward_kernel", "bwd": "backward_kernel"}
COUNTERS = {"cycles": "sm__cycles_elapsed.max", "instructions": "sm__inst_executed.sum", "dram_read": "dram__bytes_read.sum",
            "dram_written": "dram__bytes_write.sum"}
# Mask, batch entries: a few milliseconds each.
MASKS = {"full": 2, "causal": 4, "causal_document": 8, "sliding_window": 8}
ENOUGH_SECONDS = 120


def command(ncu, op, head_dims, masks):
    counters = ",".join(COUNTERS.values())
    words = [ncu, "--csv", "--page", "raw", "--print-units", "base", "-k", f"regex:{KERNELS[op]}", "--metrics", counters]
    return [*words, sys.executable, str(Path(__file__).resolve()), op, ",".join(map(str, head_dims)), ",".join(masks)]


def counted(output):
    """The counters of each profiled kernel, in order, from ncu's CSV."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row["ID"].isdigit()]
    return [{name: float(row[counter].replace(",", "")) for name, counter in COUNTERS.items()} for row in rows]


def run(arguments, receipt, save, progress_type):
    ncu = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if not ncu:
        sys.exit("there is no ncu (Nsight Compute) on the path or in /usr/local/cuda/bin")
    cells = [(mask, head_dim) for head_dim in (128, 64) for mask in MASKS]
    result = subprocess.run(command(ncu, arguments.op, (128, 64), MASKS), capture_output=True, text=True, timeout=ENOUGH_SECONDS)
    found = counted(result.stdout)
    if len(found) != len(cells):
        sys.exit(f"ncu counted {len(found)} kernels, not {len(cells)}:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    receipt["figures"]["cycles"] = [{"mask": mask, "head_dim": head_dim, "batch": MASKS[mask], "seqlen": SEQLEN, **counts}
                                    for (mask, head_dim), counts in zip(cells, found)]
    save()
    for f in receipt["figures"]["cycles"]:
        print(f"      {f['mask']:16} d={f['head_dim']:3}: {f['cycles'] / 1e6:7.3f} M cycles, {f['instructions'] / 1e6:7.1f} M instructions, "
              f"DRAM {f['dram_read'] / 1e9:.2f} GB read, {f['dram_written'] / 1e9:.2f} GB written")
    return True


def launch(op, mask_name, head_dim):
    """The kernel once; ncu watches."""
    import torch
    from flashmask_torch import Backward, Forward, Plan
    from paper_gpu import device_mask

    shape = (MASKS[mask_name], SEQLEN, HIDDEN // head_dim, head_dim)
    q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    mask = device_mask(*paper_masks.paper_mask(mask_name, SEQLEN), SEQLEN)
    plan = Plan(mask)
    forward = Forward(q, k, v, mask, plan=plan).run()
    if op == "bwd":
        Backward(forward, dout, plan=plan).run()
    torch.cuda.synchronize()


if __name__ == "__main__":
    for dim in map(int, sys.argv[2].split(",")):
        for name in sys.argv[3].split(","):
            launch(sys.argv[1], name, dim)
