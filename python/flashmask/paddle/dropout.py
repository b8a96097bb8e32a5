# SPDX-License-Identifier: Apache-2.0
"""dropout_mask, which attention weights a call with dropout keeps; and the states that say so."""

from collections.abc import Callable
from typing import Any

import paddle

from .._core import arguments, ctypes_calls
from .._core.docstrings import composed
from .tensors import Paddle, checked_tensor


@composed
def dropout_mask(state: paddle.Tensor, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> paddle.Tensor:
    """
    {dropout_mask}

    The result is in host memory. state: fixed_seed_offset of the call, or what it returned with return_seed_offset.
    """
    lengths = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = tuple(arguments.length(name, x) for name, x in lengths.items())
    return ctypes_calls.dropout_mask(Paddle, checked_state("state", state).cpu(), arguments.share("p", p), shape)


def read_state(query: paddle.Tensor, fixed_seed_offset: Any, rng_name: Any) -> Callable[[], paddle.Tensor]:
    """A function that gives a call's state of dropout, where query is; until it is called nothing is drawn."""
    if not isinstance(rng_name, str):
        raise TypeError(f"rng_name is {arguments.describe(rng_name)}; it must be a string")
    if fixed_seed_offset is not None:
        state = checked_state("fixed_seed_offset", fixed_seed_offset)
        if not state.place.is_cpu_place() and str(state.place) != str(query.place):
            raise ValueError(
                f"fixed_seed_offset is on {state.place} and query on {query.place}; it must be there or in host memory"
            )
        return lambda: state.to(query.place)
    if rng_name == "":
        return lambda: paddle.empty([2], dtype="int64", device=query.place).random_()
    try:
        generator = paddle.base.core.get_random_seed_generator(rng_name)
    except RuntimeError:
        raise ValueError(
            f"rng_name is {rng_name!r}; Paddle has no generator of that name. set_random_seed_generator of "
            "paddle.base.core makes one; fleet's tracker of states needs no rng_name within its rng_state(name)"
        ) from None
    return lambda: paddle.to_tensor([generator.random() >> 1 for _ in range(2)], dtype="int64", place=query.place)


def checked_state(name: str, x: Any) -> paddle.Tensor:
    """Contiguous."""
    arguments.check_state(name, x, checked_tensor(name, x).dtype == paddle.int64 and x.shape == [2])
    return x.contiguous()
