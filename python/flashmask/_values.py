# SPDX-License-Identifier: Apache-2.0
"""Readers of arguments that are single values, whatever library the arrays of the call are of.

Each takes an argument's name and what was given, and returns it in the one form that the rest works with, or raises a
TypeError or ValueError that names the argument, what was got and what is accepted.
"""

import operator

from .errors import UnsupportedError

MOST_TOKENS = 2**31 - 1
# A window's side from here on is open: |j - i| is less than 2^31, and q_offset is at most 2^40.
UNBOUNDED = 2**41
LAYOUTS = {"bshd": "[batch, seqlen, heads, head_dim]", "bhsd": "[batch, heads, seqlen, head_dim]"}


def given(value):
    """What was got, in a few words."""
    if getattr(value, "is_nested", False):
        return "a nested tensor"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{_kind(value)}, {value.dtype} {list(value.shape)}"
    if value is None:
        return "None"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _kind(array):
    if hasattr(array, "is_nested"):
        return "a tensor"
    return f"a {type(array).__module__}.{type(array).__name__}"


def refuse_unsupported(**arguments):
    """UnsupportedError naming the first argument that is not what is accepted of it; name=(value, accepted)."""
    for name, (value, accepted) in arguments.items():
        if value is not accepted and (value is None or accepted is None or value != accepted):
            raise UnsupportedError(f"{name} is {given(value)}; it must be {accepted!r}: it is not implemented")


def refuse_beside_mask(**arguments):
    """ValueError naming the first argument that is not None: it came with a Mask, which says that itself."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name} is given beside a Mask, which says that itself; "
                "leave it out, or put it into the mask: mask.replace(...)"
            )


# --- Single values ------------------------------------------------------------------------------------


def integer(name, value, least=None, most=None, rule=None):
    """An int (numpy's, or a length that is traced) from `least` to `most`; `rule` says that in other words."""
    if type(value) is not int:
        value = _as_int(name, value)
    if least is not None and value < least or most is not None and value > most:
        rule = rule or (f"it must be at least {least}" if most is None else f"it must be between {least} and {most}")
        raise ValueError(f"{name} is {value}; {rule}")
    return value


def _as_int(name, value):
    if isinstance(value, int) and not isinstance(value, bool) or _is_symbol(value):
        return value
    if isinstance(value, bool) or _is_array(value) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {given(value)}; it must be an int")
    return operator.index(value)


def _is_symbol(value):
    """Whether it is torch's name for a number that is traced, which stays one."""
    return type(value).__name__ in ("SymInt", "SymFloat")


def _is_array(value):
    """Whether it is an array or tensor; numpy's scalars, which have a shape too, are numbers."""
    return hasattr(value, "shape") and not (type(value).__module__ == "numpy" and type(value).__name__ != "ndarray")


def length(name, value):
    """A number of tokens."""
    return integer(name, value, 0, MOST_TOKENS)


def number(name, value):
    """A float, from an int or a float of any library."""
    if isinstance(value, float) or _is_symbol(value):
        return value
    if isinstance(value, (bool, str)) or _is_array(value) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {given(value)}; it must be a float")
    return float(value)


def share(name, value):
    """A number that is at least 0 and less than 1."""
    value = number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 0 and less than 1")
    return value


def flag(name, value):
    """True or False, for which 1 and 0 and numpy's stand, too."""
    if value is True or value is False:
        return value
    if hasattr(value, "__len__") or value not in (0, 1):
        raise TypeError(f"{name} is {given(value)}; it must be True or False")
    return bool(value)


def choice(name, value, accepted):
    """One of some strings."""
    if not isinstance(value, str) or value not in accepted:
        kind, got = (ValueError, repr(value)) if isinstance(value, str) else (TypeError, given(value))
        raise kind(f"{name} is {got}; it must be {' or '.join(map(repr, accepted))}")
    return value


def sequence(name, values):
    """A list of whatever can be iterated over."""
    if not hasattr(values, "__iter__"):
        raise TypeError(f"{name} is {given(values)}; it must be a list or tuple")
    return list(values)


def window(name, value):
    """(left, right) of an int (both sides), a pair, or None; None if both are open.

    An open side is -1, None, or beyond all sequences.
    """
    if value is None:
        return None
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} has {len(pair)} entries; it must be an int or (left, right)")
    left, right = (_window_side(name, value, side) for side in pair)
    return None if left == -1 and right == -1 else (left, right)


def _window_side(name, value, side):
    if type(side) is not int:
        if side is None:
            return -1
        try:
            side = _as_int(name, side)
        except TypeError:
            raise TypeError(
                f"{name} is {given(value)}; it must be an int or (left, right), ints of at least 0, or -1 for open"
            ) from None
    if side < -1:
        raise ValueError(f"{name} is {value}; each side must be at least 0, or -1 for open")
    return -1 if side >= UNBOUNDED else side
