# SPDX-License-Identifier: Apache-2.0
"""First step of check_wheel, without torch: the wheel's library needs only the system's C and C++ runtimes."""

import ctypes
import importlib.util
import sys
from pathlib import Path

SYSTEM = ("libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so", "libstdc++.so", "libgcc_s.so", "ld-linux-")


def mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in lines if ".so" in line}


package = Path(importlib.util.find_spec("flashmask").origin).parent
assert package.is_relative_to(sys.prefix), package
before = mapped()
library = ctypes.CDLL(str(package / "libflashmask.so"))
loaded = mapped() - before
own = {path for path in loaded if path.is_relative_to(package)}
assert {path.name for path in own} == {"libflashmask.so", "libgomp.so.1", "libhwy.so.1"}, own
assert not [path for path in loaded - own if not path.name.startswith(SYSTEM)], loaded

# An exception that is thrown and caught inside.
library.fm_last_error.restype = ctypes.c_char_p
assert library.fm_plan_bytes(None, None) == 1
assert b"mask" in library.fm_last_error(), library.fm_last_error()
