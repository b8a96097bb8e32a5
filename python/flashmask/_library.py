# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the compiled libraries. Neither touches a GPU when it is loaded.

FLASHMASK_TORCH_LIBRARY names the operators' library and FLASHMASK_LIBRARY the library they call, for development;
otherwise both lie beside this file, as the wheel installs them.
"""

import ctypes
import os
from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)


def library_path(variable, name):
    """The file that the environment variable names, or `name` beside the package; ImportError if it is not there."""
    path = Path(os.environ.get(variable) or Path(__file__).with_name(name))
    if not path.is_file():
        raise ImportError(
            f"{path} is not there. Install flashmask with `pip install .` from its source, "
            f"or set {variable} to a built {name}"
        )
    return path


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
        ctypes.CDLL(str(library_path("FLASHMASK_LIBRARY", "libflashmask.so")))
    torch.ops.load_library(library_path("FLASHMASK_TORCH_LIBRARY", "libflashmask_torch.so"))
