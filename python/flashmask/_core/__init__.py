# SPDX-License-Identifier: Apache-2.0
"""Shared by all frontends, none of which it imports; needs Python's standard library alone.

From the ground up: errors; arguments, annotations and docstrings; capi, the C interface through ctypes; and over it
families, explanation and ctypes_calls.
"""
