# SPDX-License-Identifier: Apache-2.0
"""Arguments with which transformers' models call attention, as ours take them."""

from typing import Any

import torch

from .._core import call_options
from .._core.errors import UnsupportedError

# Arguments that would change the result and are not implemented.
_REFUSED = (
    *("position_bias", "head_mask", "cache", "indices", "block_indices", "sinks", "block_mask", "score_mod"),
    *(option.name for option in call_options.TENSORS),  # a sink is s_aux
)


def refuse(given: dict[str, Any], output_attentions: bool | None) -> None:
    """UnsupportedError naming an argument that would change the result and is not implemented."""
    for name in _REFUSED:
        if given.get(name) is not None:
            raise UnsupportedError(f"{name} is not implemented by this attention; attn_implementation='eager' takes it")
    if output_attentions:
        raise UnsupportedError("output_attentions=True is not implemented: no attention weights are stored")


def score_options(scaling: float | None, softcap: float | None, s_aux: torch.Tensor | None) -> dict[str, Any]:
    """The options of our calls that change scores."""
    return {"softmax_scale": scaling, "softcap": 0.0 if softcap is None else softcap, "sink": s_aux}
