# SPDX-License-Identifier: Apache-2.0
"""Other libraries' kernels as contenders, built elsewhere: measuring instruments, which never become part of this
repository.

They lie in build/peers, or where FLASHMASK_PEERS says.
"""

import os
from pathlib import Path

from benchmarks import ROOT

FILES = {
    "flashmask_v3": "libfmv3.so",
    "fa3": "libfa3.so",
    "fa3_xla": "libdew_flash_attn3.so",
    "fa3_cache": "_vllm_fa3_C.abi3.so",
}


class LeftOut(Exception):
    """The reason why a contender does not take part in a cell. The cell says so and is no worse for it."""


def folder():
    return Path(os.environ.get("FLASHMASK_PEERS") or ROOT / "build" / "peers")


def library(*names):
    """The path of a peer's library, the first that is there of these; LeftOut if none is."""
    for path in (folder() / FILES[name] for name in names):
        if path.exists():
            return path
    raise LeftOut(f"there is no {' or '.join(FILES[name] for name in names)} in {folder()}")
