# SPDX-License-Identifier: Apache-2.0
"""Small random forward problems: every vector form, band, offset and block mask, mixed."""

import numpy as np
import torch
from cases import DEVICE, Case
from ingredients import DIMS

LENGTHS = (1, 2, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300, 385)


def choose(rng, *options):
    return options[int(rng.integers(len(options)))]


def length(rng):
    return int(choose(rng, *LENGTHS)) if rng.random() < 0.7 else int(rng.integers(1, 420))


def vector(rng, shape, seqlen_q):
    """Row bounds: anything, or constant over runs of keys, so that whole tiles are hidden and whole tiles are not."""
    if rng.random() < 0.5:
        return rng.integers(-3, seqlen_q + 4, shape)
    run = int(choose(rng, 1, 50, 128, 200, 1000))
    values = rng.integers(0, seqlen_q + 1, (*shape[:2], -(-shape[2] // run)))
    return np.repeat(values, run, axis=2)[:, :, : shape[2]]


def mask_batch_and_heads(rng, case):
    return choose(rng, 1, case.batch), choose(rng, 1, case.heads_kv, case.heads)


def add_bounds(rng, case):
    case.causal, vectors = choose(rng, (False, 0), (True, 0), (True, 1), (True, 2), (False, 2), (False, 4))
    if vectors:
        shape = (*mask_batch_and_heads(rng, case), case.seqlen_k)
        drawn = np.stack([vector(rng, shape, case.seqlen_q) for _ in range(vectors)], -1)
        case.bounds = torch.from_numpy(np.ascontiguousarray(drawn.astype(np.int32))).to(DEVICE)


def add_band(rng, case):
    if rng.random() < 0.3:
        case.window = tuple(int(choose(rng, -1, 0, 5, 64, 130, int(rng.integers(case.seqlen_k)))) for _ in range(2))
    if rng.random() < 0.3:
        case.q_offset = int(rng.integers(-case.seqlen_q - 5, case.seqlen_k + 6))


def add_block_mask(rng, case):
    if rng.random() < 0.35:
        shape = (*mask_batch_and_heads(rng, case), -(-case.seqlen_q // 128), -(-case.seqlen_k // 128))
        kept = torch.from_numpy(rng.integers(0, 2, shape).astype(np.uint8)).to(DEVICE)
        case.block_mask = kept.bool() if rng.random() < 0.5 else kept * 7


def random_case(seed, dims=DIMS):
    rng = np.random.default_rng(seed)
    heads_kv = choose(rng, 1, 1, 2, 3)
    same = rng.random() < 0.4
    seqlen_q = length(rng)
    case = Case(
        seqlen_q,
        seqlen_q if same else length(rng),
        batch=choose(rng, 1, 1, 2, 3),
        heads_kv=heads_kv,
        heads=heads_kv * choose(rng, 1, 1, 2, 4),
        seed=seed,
        dim=choose(rng, *dims),
        dtype=choose(rng, torch.bfloat16, torch.float16),
        layout=choose(rng, "bshd", "bshd", "bhsd", "padded", "packed"),
        scale=choose(rng, None, None, None, 0.3, 0.2, 0.0),
    )
    add_bounds(rng, case)
    add_band(rng, case)
    add_block_mask(rng, case)
    return case
