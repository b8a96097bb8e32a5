# SPDX-License-Identifier: Apache-2.0
"""The error that storing a cache in e4m3 makes: a table, by data and by what a scale is of.

    python -m benchmarks.measure.float8_storage

Attention over the stored cache against that over the numbers that were stored, both in float32 on the CPU, so that no
other rounding shows; the last column is of a cache in bfloat16. Scales of the tensor and of heads are calibrated on
the same numbers (scales_of); append_kv writes the others. "Whole page" is what a caller can give who has all tokens of
a page: their largest magnitude over 448. Errors are norms: of the difference, over that of the output.
"""

import math

import torch
from flashmask import append_kv, flashmask_with_kvcache
from flashmask.inference import KvCache, scales_of

REQUESTS, ROWS, HEADS_KV, GROUP, DIM, PAGE = 2, 4, 4, 4, 128, 64
CALIBRATED = ("tensor", "head")
WRITTEN = {"page": (1, 1), "token": (PAGE, 1), "token and head": (PAGE, HEADS_KV)}  # scales of a page
SCALES = (*CALIBRATED, "whole page", *WRITTEN)


def random_data(keys, generator):
    q, k, v = draw(keys, generator)
    return q, k, v


def outlier_channels(keys, generator):
    """Two channels of 128 of K are 30 times as large, as in models whose keys have a few such channels."""
    q, k, v = draw(keys, generator)
    k[..., [17, 90]] *= 30
    return q, k, v


def needle(keys, generator):
    """A row looks for one key among many: what it finds there is most of the output."""
    q, k, v = draw(keys, generator)
    found = torch.randint(0, keys - ROWS, (REQUESTS,), generator=generator)
    for b in range(REQUESTS):
        looked_for = q[b].unflatten(1, (HEADS_KV, GROUP)).mean((0, 2))
        k[b, found[b]] = looked_for / looked_for.norm(dim=-1, keepdim=True) * 1.4 * math.sqrt(DIM)
    return q, k, v


DATA = {
    "random, 4096 keys": (random_data, 4096),
    "outlier channels in K, 4096 keys": (outlier_channels, 4096),
    "a needle in 16384 keys": (needle, 16384),
}


def draw(keys, generator):
    heads = HEADS_KV * GROUP
    q = torch.randn(REQUESTS, 1, heads, DIM, generator=generator).expand(-1, ROWS, -1, -1).contiguous()
    k, v = (torch.randn(REQUESTS, keys, HEADS_KV, DIM, generator=generator) for _ in range(2))
    return q, k, v


def attend(q, k, v, dtype, scale_of=None):
    """The output over a cache of a dtype in which k and v were stored."""
    keys = k.shape[1]
    pages = torch.zeros(2, REQUESTS * keys // PAGE, PAGE, HEADS_KV, DIM).to(dtype)
    table = torch.arange(pages.shape[1], dtype=torch.int32).view(REQUESTS, -1)
    seqlens = torch.full((REQUESTS,), keys, dtype=torch.int32)
    if dtype == torch.bfloat16:  # stored in bfloat16, and read as float32
        append_kv(k.to(dtype), v.to(dtype), KvCache(*pages, table, seqlens))
        return flashmask_with_kvcache(q, KvCache(*pages.float(), table, seqlens))
    scales = (None, None)
    if scale_of in CALIBRATED:
        scales = scales_of(k, v, scale_of)
    elif scale_of == "whole page":
        scales = (x.reshape(-1, PAGE, HEADS_KV, DIM).abs().amax((1, 2, 3)).view(-1, 1, 1) / 448 for x in (k, v))
    elif scale_of is not None:
        scales = torch.zeros(2, pages.shape[1], *WRITTEN[scale_of])
    cache = KvCache(*pages, table, seqlens, *scales)
    append_kv(k, v, cache, write_scales=scale_of in WRITTEN)
    return flashmask_with_kvcache(q, cache)


def main():
    columns = [*SCALES, "bfloat16"]
    print(f"| data | scale of a {' | '.join(SCALES)} | bfloat16 |")
    print("|---" * (len(columns) + 1) + "|")
    for name, (draw_data, keys) in DATA.items():
        q, k, v = draw_data(keys, torch.Generator().manual_seed(20261128))
        exact = attend(q, k, v, torch.float32)
        stored = [attend(q, k, v, torch.float8_e4m3fn, scale_of) for scale_of in SCALES]
        stored.append(attend(q, k, v, torch.bfloat16))
        errors = [(out - exact).norm() / exact.norm() for out in stored]
        print(f"| {name} | " + " | ".join(f"{100 * error:.2g} %" for error in errors) + " |")


if __name__ == "__main__":
    main()
