# SPDX-License-Identifier: Apache-2.0
"""dropout_mask: which attention weights a call with dropout keeps; and the states that calls draw."""

import torch

from .._core import arguments, ctypes_calls, explanation
from .._core.docstrings import composed
from . import tensor_arguments

__all__ = ["dropout_mask"]

_ANY = 2**63 - 1


@composed
def dropout_mask(state: torch.Tensor, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """
    {dropout_mask}

    The result is on state's device, int64 [2]; if that is a GPU, this waits for it.
    """
    check_state(state, "state")
    tensor_arguments.check_holds("state", state)
    shape = tuple(
        arguments.length(name, x)
        for name, x in (("batch", batch), ("heads", heads), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k))
    )
    kept = ctypes_calls.dropout_mask(_Torch, state.detach().cpu().contiguous(), arguments.share("p", p), shape)
    return kept.to(state.device)


def check_state(state: torch.Tensor, name: str = "dropout_state") -> None:
    """TypeError or ValueError unless it is what torch takes for a state."""
    tensor_arguments.check_dense(name, state, "int64 [2]")
    arguments.check_state(name, state, state.dtype == torch.int64 and tuple(state.shape) == (2,))


def draw_state(device: torch.device) -> torch.Tensor:
    """A seed and an offset from torch's default generator of the device."""
    return torch.randint(_ANY, (2,), dtype=torch.int64, device=device)


def read_as_paddle(
    query: torch.Tensor,
    dropout: float,
    dropout_state: torch.Tensor | None,
    fixed_seed_offset: torch.Tensor | None,
    rng_name: str,
    training: bool,
    return_seed_offset: bool,
) -> tuple[float, torch.Tensor | None]:
    """(dropout, dropout_state) that a call with Paddle's arguments means; a state that is returned is there."""
    arguments.refuse_unsupported(rng_name=(rng_name, ""))
    if fixed_seed_offset is not None:
        if dropout_state is not None:
            raise ValueError("fixed_seed_offset is given beside dropout_state, which is the same; leave one out")
        check_state(fixed_seed_offset, "fixed_seed_offset")
        dropout_state = fixed_seed_offset
    if arguments.flag("return_seed_offset", return_seed_offset) and dropout_state is None:
        tensor_arguments.check_dense("query", query)
        dropout_state = draw_state(query.device)
    return dropout if arguments.flag("training", training) else 0.0, dropout_state


class _Torch:
    """The frontend that ctypes_calls asks for arrays."""

    @staticmethod
    def empty_on_host(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")

    @staticmethod
    def array(x: torch.Tensor) -> explanation.Array:
        return explanation.Array(tuple(x.shape), str(x.dtype), "cpu", x.stride(), x.data_ptr())
