# SPDX-License-Identifier: Apache-2.0
"""The C interface of c_api.h as ctypes sees it: the library, its structs, and numpy arrays as fm_tensor."""

from ._core import call_options
from ._core.call_options import Options as Options
from ._core.capi import *  # noqa: F403

options = call_options.make
