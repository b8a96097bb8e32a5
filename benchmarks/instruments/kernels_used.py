# SPDX-License-Identifier: Apache-2.0
"""Kernels of the library that a run used, as receipts name them: {id: hash of its machine code}."""

import os
import sys

from benchmarks import receipts


def case_of(op, head_dim, seqlen, batch, heads, heads_kv=None, mask="full", dtype="bfloat16", head_dim_v=None):
    """The fields of a receipt's case that decide which kernels run."""
    return {
        "op": op,
        "mask": mask,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v or head_dim,
        "seqlen": seqlen,
        "batch": batch,
        "heads": heads,
        "heads_kv": heads_kv or heads,
        "dtype": dtype,
    }


class Kernels(receipts.Library):
    """The kernels of the library that is measured, $FLASHMASK_LIBRARY. Their hashes are read once. `arch`: the kernel
    set that calls run."""

    def __init__(self, multiprocessors=receipts.MULTIPROCESSORS, arch=receipts.HOPPER):
        super().__init__(library_path())
        self.multiprocessors, self.arch = multiprocessors, arch

    def of(self, case, modes=(False,)):
        """Hashes of the kernels that a case ran in `modes`: deterministic or not."""
        return self.hashes_of(self.in_modes({**case, "arch": self.arch}, modes, self.multiprocessors))

    def of_cell(self, case):
        """Hashes of the kernels that a case and its peers of our own ran."""
        return self.hashes_of(self.kernels_of(case, self.multiprocessors))

    def hashes_of(self, ids):
        return {i: self.hashes[i] for i in sorted(ids)}

    def of_all(self, cases, modes=(False,)):
        return {i: found for case in cases for i, found in self.of(case, modes).items()}

    def of_plan(self):
        """Hashes of the planner's kernels for the measured masks, which have neither positions nor lists."""
        found = self.of(case_of("fwd", head_dim=128, seqlen=8192, batch=1, heads=8))
        return {i: value for i, value in found.items() if receipts.is_plan_kernel(i)}

    def of_masks(self):
        return {i: found for i, found in sorted(self.hashes.items()) if i.endswith(".masks")}


class DryKernels(Kernels):
    """Invented kernels, for dry runs."""

    def __init__(self):
        self.toolkit, self.arch = "none", os.environ.get("FLASHMASK_KERNELS") or receipts.HOPPER

    def of_cell(self, case):
        return {f"{self.arch}.{case['op']}.bf16.d{case['head_dim']}.dv{case['head_dim_v']}": "0" * 16}


def library_path():
    from harness import kernels

    return kernels.default_library() or sys.exit("there is no library: FLASHMASK_LIBRARY names one")


def here():
    """Kernels of the library on the first CUDA device."""
    import torch
    from harness import kernels

    device = torch.cuda.get_device_properties(0)
    return Kernels(device.multi_processor_count, kernels.set_in_use(library_path(), (device.major, device.minor)))
