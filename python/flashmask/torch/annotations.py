# SPDX-License-Identifier: Apache-2.0
"""Types in the signatures of PyTorch's functions."""

from typing import TypeAlias

import torch

Device: TypeAlias = torch.device | str | int
