# SPDX-License-Identifier: Apache-2.0
"""Readers of arguments that are single values, whatever library the arrays of the call are of, and what all frontends
say of arguments that are arrays.

A reader takes an argument's name and value, and returns the value in the one form that the rest works with, or raises a
TypeError or ValueError that names the argument, what was got and what is accepted.
"""

import operator
from collections.abc import Collection, Sequence
from typing import Any

from .errors import UnsupportedError

MOST_TOKENS = 2**31 - 1
MOST_OFFSET = 2**40  # bound of |q_offset|: beyond all sequences, and differences of positions fit int64
# A window's side from here on is open: |j - i| is less than 2^31, and q_offset is at most 2^40.
UNBOUNDED = 2**41
LAYOUTS = {"bshd": "[batch, seqlen, heads, head_dim]", "bhsd": "[batch, heads, seqlen, head_dim]"}


def describe(value: object) -> str:
    """Describes a value in a few words, for error messages."""
    if getattr(value, "is_nested", False):
        return "a nested tensor"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{_kind(value)}, {value.dtype} {list(value.shape)}"
    if value is None:
        return "None"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _kind(array: object) -> str:
    if hasattr(array, "is_nested"):
        return "a tensor"
    return f"a {type(array).__module__}.{type(array).__name__}"


def refuse_unsupported(**arguments: tuple[object, object]) -> None:
    """UnsupportedError naming the first argument that is not what is accepted of it; name=(value, accepted)."""
    for name, (value, accepted) in arguments.items():
        if value is not accepted and (value is None or accepted is None or value != accepted):
            raise UnsupportedError(f"{name} is {describe(value)}; it must be {accepted!r}: it is not implemented")


def refuse_beside_mask(**arguments: object) -> None:
    """ValueError naming the first argument that is not None: it came with a Mask, which says that itself."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name} is given beside a Mask, which says that itself; "
                "leave it out, or put it into the mask: mask.replace(...)"
            )


def check_mask_lengths(mask: Any, seqlen_q: int, seqlen_k: int) -> None:
    """ValueError unless a Mask is for the lengths of the call."""
    if mask.seqlen_q != seqlen_q or mask.seqlen_k != seqlen_k:
        raise ValueError(
            f"the mask is for {mask.seqlen_q} query rows and {mask.seqlen_k} keys; "
            f"the call has {seqlen_q} and {seqlen_k}"
        )


def not_a_mask(name: str, value: object) -> TypeError:
    """The TypeError of what a frontend of torch's tensors takes for no mask."""
    return TypeError(f"{name} is a {type(value).__name__}; it must be a flashmask.Mask, a tensor or None")


def does_not_change(name: str | None = None) -> AttributeError:
    """The AttributeError of a Mask whose attribute is set, or deleted."""
    advice = f"; make another one: mask.replace({name}=...)" if name else ""
    return AttributeError(f"a Mask does not change{advice}")


def no_second_derivatives() -> UnsupportedError:
    return UnsupportedError(
        "second derivatives of flashmask attention are not implemented; backward without create_graph=True"
    )


# --- Arrays, which a frontend describes ------------------------------------------------------------------


def check_dimensions(name: str, shape: Sequence[int], wanted: str) -> None:
    """ValueError unless there are the dimensions that `wanted` names."""
    if len(shape) != (dimensions := wanted.count(",") + 1):
        raise ValueError(f"{name} has shape {list(shape)}; it must have {dimensions} dimensions, {wanted}")


def check_vector(name: str, x: Any, is_right: bool, kind: str = "integers", shape: str | None = None) -> None:
    """TypeError unless its elements are of the kind; ValueError if it is a number where `shape` says what is needed."""
    if not is_right:
        raise TypeError(f"{name} is {x.dtype}; it must be {kind}")
    if shape is not None and x.ndim < 1:
        raise ValueError(f"{name} is a single number; it must be {shape}")


def check_matrix(visible: Any, is_right: bool) -> None:
    """ValueError unless it is a dense matrix: of bools or uint8 by `is_right`, in two or four dimensions."""
    if not is_right or visible.ndim not in (2, 4):
        raise ValueError(
            f"visible is {describe(visible)}; "
            "it must be bool or uint8, [seqlen_q, seqlen_k] or [batch, heads, seqlen_q, seqlen_k]"
        )


def check_state(name: str, x: object, is_right: bool, dtypes: str = "int64") -> None:
    """ValueError unless it is a state of dropout."""
    if not is_right:
        raise ValueError(f"{name} is {describe(x)}; it must be {dtypes} [2], a seed and an offset")


def elsewhere(name: str, place: object, other: str, others_place: object) -> ValueError:
    """The ValueError of tensors in two places."""
    return ValueError(
        f"{name} is on {place} and {other} on {others_place}; all tensors of a call must be on one device"
    )


def ragged(name: str, error: Exception) -> ValueError:
    """The ValueError of lists that are no array."""
    return ValueError(f"{name} must be integers, nested lists of one length: {error}")


def missing_seqlen(name: str, why: str) -> ValueError:
    """The ValueError of a mask whose length follows from values that are not read."""
    return ValueError(
        f"seqlen is missing; {name} is not read on the host ({why}), so the length of the sequence must be given"
    )


# --- Single values ------------------------------------------------------------------------------------


def integer(name: str, value: Any, least: int | None = None, most: int | None = None, rule: str | None = None) -> int:
    """An int (numpy's, or a length that is traced) from `least` to `most`; `rule` says that in other words."""
    if type(value) is not int:
        value = _as_int(name, value)
    if least is not None and value < least or most is not None and value > most:
        rule = rule or (f"it must be at least {least}" if most is None else f"it must be between {least} and {most}")
        raise ValueError(f"{name} is {value}; {rule}")
    return value


def _as_int(name: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) or _is_symbol(value):
        return value
    if isinstance(value, bool) or _is_array(value) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {describe(value)}; it must be an int")
    return operator.index(value)


def _is_symbol(value: object) -> bool:
    """Tells torch's symbolic numbers, which stand for numbers that are traced."""
    return type(value).__name__ in ("SymInt", "SymFloat")


def _is_array(value: object) -> bool:
    """Tells arrays and tensors from numbers; numpy's scalars are numbers, although they have a shape."""
    return hasattr(value, "shape") and not (type(value).__module__ == "numpy" and type(value).__name__ != "ndarray")


def count(name: str, value: Any) -> int:
    """A number of threads or CTAs."""
    return integer(name, value, 0, 2**31 - 1)


def bytes_at_most(name: str, value: Any) -> int:
    """A limit in bytes; None is 0: the default."""
    return 0 if value is None else integer(name, value, 0, 2**63 - 1)


def length(name: str, value: Any) -> int:
    """A number of tokens."""
    return integer(name, value, 0, MOST_TOKENS)


def q_offset(value: Any) -> int | None:
    """Position of the first row among the keys, or None. The library checks an offset that is traced."""
    if value is None or _is_symbol(value):
        return value
    return integer("q_offset", value, -MOST_OFFSET, MOST_OFFSET, "it must be between -2^40 and 2^40")


def number(name: str, value: Any) -> float:
    """A float, from an int or a float of any library."""
    if isinstance(value, float) or _is_symbol(value):
        return value
    if isinstance(value, (bool, str)) or _is_array(value) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {describe(value)}; it must be a float")
    return float(value)


def share(name: str, value: Any) -> float:
    """A number that is at least 0 and less than 1."""
    value = number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 0 and less than 1")
    return value


def flag(name: str, value: Any) -> bool:
    """True or False, for which 1 and 0 and numpy's stand, too."""
    if value is True or value is False:
        return value
    if hasattr(value, "__len__") or value not in (0, 1):
        raise TypeError(f"{name} is {describe(value)}; it must be True or False")
    return bool(value)


def choice(name: str, value: Any, accepted: Collection[str]) -> str:
    """One of some strings."""
    if not isinstance(value, str) or value not in accepted:
        kind, got = (ValueError, repr(value)) if isinstance(value, str) else (TypeError, describe(value))
        raise kind(f"{name} is {got}; it must be {' or '.join(map(repr, accepted))}")
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {describe(value)}; it must be a string, as 'auto'")
    return value


def sequence(name: str, values: Any) -> list[Any]:
    """A list of whatever can be iterated over."""
    if not hasattr(values, "__iter__"):
        raise TypeError(f"{name} is {describe(values)}; it must be a list or tuple")
    return list(values)


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """(left, right), which one value is both of."""
    sides = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(sides) != 2:
        raise ValueError(f"{name} has {len(sides)} entries; it must be an int or (left, right)")
    return sides[0], sides[1]


def window(name: str, value: Any) -> tuple[int, int] | None:
    """(left, right) of an int (both sides), a pair, or None; None if both are open.

    An open side is -1, None, or beyond all sequences.
    """
    if value is None:
        return None
    left, right = (_window_side(name, value, side) for side in pair(name, value))
    return None if left == -1 and right == -1 else (left, right)


def _window_side(name: str, value: object, side: Any) -> int:
    if type(side) is not int:
        if side is None:
            return -1
        try:
            side = _as_int(name, side)
        except TypeError:
            raise TypeError(
                f"{name} is {describe(value)}; it must be an int or (left, right), ints of at least 0, or -1 for open"
            ) from None
    if side < -1:
        raise ValueError(f"{name} is {value}; each side must be at least 0, or -1 for open")
    return -1 if side >= UNBOUNDED else side
