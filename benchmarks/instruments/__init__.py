# SPDX-License-Identifier: Apache-2.0
"""Instruments that measurements share: clocks, statistics, the turn on the GPU, and the kernels that ran."""
