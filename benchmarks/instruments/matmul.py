# SPDX-License-Identifier: Apache-2.0
"""One large matrix product, whose speed in a run says how warm the card was."""

SIZE = 8192


def tflops(ms):
    """TFLOP/s of a product that took `ms` milliseconds."""
    return 2 * SIZE**3 / ms / 1e9
