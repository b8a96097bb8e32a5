# SPDX-License-Identifier: Apache-2.0
"""All uses of torch's private API, each with a substitute from the public API for a torch that lacks it.

The private functions save host time in every call; the substitutes give the same results. FLASHMASK_PUBLIC_TORCH=1
takes the substitutes everywhere, as the tests do.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

with contextlib.suppress(ImportError):  # torch itself does not load all of its modules
    import torch._subclasses
    import torch.utils._pytree

__all__ = [
    "apply_of",
    "are_transforms_active",
    "assert_async",
    "below_autograd",
    "entry_of",
    "is_any_autocast_enabled",
    "is_dual_level_active",
    "is_fake",
    "is_wrapped_by_transforms",
    "pytree",
]


def _find(path: str) -> Any:
    """The attribute of torch at a dotted path, or None where this torch has none."""
    if os.environ.get("FLASHMASK_PUBLIC_TORCH"):
        return None
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# --- State, asked in every call -----------------------------------------------------------------------------

# The substitute lets each call ask for its own device.
is_any_autocast_enabled: Callable[[], bool] = _find("_C._is_any_autocast_enabled") or (lambda: True)
# The substitute sends calls within torch.func's transforms through autograd's kernel like all others.
are_transforms_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active") or (lambda: False)
# Tensors may have tangents. The substitute lets all of them be asked.
is_dual_level_active: Callable[[], bool] = (
    (lambda: True) if _find("autograd.forward_ad._current_level") is None else (lambda: forward_ad._current_level >= 0)
)


# --- Operators and autograd ---------------------------------------------------------------------------


def below_autograd(operator: Any) -> Callable[..., Any]:
    """A function that calls an operator's overload without its autograd kernel."""
    guard = _find("_C._AutoDispatchBelowAutograd")
    if guard is None:
        return _in_inference_mode(operator)
    kernel = entry_of(operator)

    def call(*arguments: Any) -> Any:
        with guard():
            return kernel(*arguments)

    return call


def entry_of(operator: Any) -> Callable[..., Any]:
    """A function that calls an operator's overload with arguments by position, and saves the overload's __call__."""
    return operator if os.environ.get("FLASHMASK_PUBLIC_TORCH") else getattr(operator, "_op", operator)


def _in_inference_mode(operator: Any) -> Callable[..., Any]:
    """Inference mode leaves out autograd kernels, too. Its tensors take no part in autograd; their copies do."""

    def call(*arguments: Any) -> Any:
        with torch.inference_mode():
            results: Sequence[torch.Tensor] = operator(*arguments)
        return tuple(x.clone() for x in results)

    return call


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply less its provisions for torch.func, for calls that never come from there."""
    if _find("_C._FunctionBase.apply") is None:
        return function.apply
    return super(torch.autograd.Function, function).apply


# --- Tensors ------------------------------------------------------------------------------------------

_is_wrapped, _Fake = _find("_C._functorch.is_functorch_wrapped_tensor"), _find("_subclasses.FakeTensor")


def is_wrapped_by_transforms(tensor: torch.Tensor) -> bool:
    """True if a tensor stands for others that a transform of torch.func maps, and has no contents of its own."""
    if _is_wrapped:
        return _is_wrapped(tensor)
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def is_fake(tensor: torch.Tensor) -> bool:
    """True of a trace's stand-in for a tensor."""
    return isinstance(tensor, _Fake) if _Fake else tensor.untyped_storage().device != tensor.device


def _assert_now(holds: torch.Tensor, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


# An assertion in a device's work; without torch's own, one that waits for it.
assert_async: Callable[[torch.Tensor, str], None] = _find("_assert_async") or _assert_now

pytree = _find("utils._pytree")  # None: masks are leaves of trees
