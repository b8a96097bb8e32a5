# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that fits."""

import time


def longest(fits, first, most, seconds, granule, power=2):
    """(longest length that fits or None, shortest that does not or None, why the search ended).

    fits(length) tries one; what fits is taken to fit at every shorter length. From `first` on lengths double up to
    `most`, then the gap is halved until it is a 16th of the length, or a granule, a divisor of all lengths. A length is
    not tried if it could take longer than what is left of `seconds`, judged by the last one's time, which grows with
    this power of the length.
    """
    end, low, high, took = time.monotonic() + seconds, None, None, 0.0
    while True:
        if high is None:
            length = first if low is None else 2 * low
            if length > most:
                return low, None, "limit"
        elif low is None or high - low <= max(granule, low // 16):
            return low, high, "found"
        else:
            length = (low + high) // 2 // granule * granule
            if length in (low, high):
                return low, high, "found"
        if low and time.monotonic() + took * (length / low) ** power > end:
            return low, high, "time"
        begin = time.monotonic()
        if fits(length):
            low, took = length, time.monotonic() - begin
        else:
            high = length
