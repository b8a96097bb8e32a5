# SPDX-License-Identifier: Apache-2.0
"""Calls and an oracle for the benchmarks and the GPU tests; not part of the installed package."""
