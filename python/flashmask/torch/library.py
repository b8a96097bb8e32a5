# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the compiled libraries for torch. Neither touches a GPU when it is loaded.

FLASHMASK_TORCH_LIBRARY names the operators' library and FLASHMASK_LIBRARY the library they call, for development;
otherwise both lie beside this file, as the wheel installs them.
"""

import os

import torch

from .._core import capi

OLDEST_TORCH = (2, 10)


def check_torch(version):
    """ImportError if torch is older than the operators' binary interface."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        raise ImportError(f"flashmask needs PyTorch {'.'.join(map(str, OLDEST_TORCH))} or later; this is {version}")


def load():
    """Loads the operators into torch.ops.flashmask. A second call does nothing."""
    if hasattr(torch.ops.flashmask, "forward"):
        return
    check_torch(torch.__version__)
    if os.environ.get("FLASHMASK_LIBRARY"):
        capi.load()
    torch.ops.load_library(capi.library_path("FLASHMASK_TORCH_LIBRARY", "libflashmask_torch.so"))
