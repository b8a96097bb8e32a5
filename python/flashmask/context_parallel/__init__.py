# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: one sequence over several processes, each with its own rows.

    from flashmask import context_parallel
    placement = context_parallel.place(mask, world_size)
    tokens = placement.shard(tokens, rank)

docs/context-parallel.md.
"""

from .attention import attention
from .cost import Cost, Machine
from .local_mask import LocalMask, local_mask
from .placement import Placement, place

__all__ = ["Cost", "LocalMask", "Machine", "Placement", "attention", "local_mask", "place"]
