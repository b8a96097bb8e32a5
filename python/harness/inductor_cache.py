# SPDX-License-Identifier: Apache-2.0
"""Gives torch.compile a cache of this process alone, when it is imported (before torch's compiler).

What it compiled is found again by what was traced, which says nothing of the library: after a change of a plan's size
the code of an earlier build would assert the size of before.
"""

import atexit
import os
import shutil
import tempfile

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="flashmask-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
