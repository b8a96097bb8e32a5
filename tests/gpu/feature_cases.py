# SPDX-License-Identifier: Apache-2.0
"""Ingredients of the cases of features, with every kernel's head dims."""

import pytest
import torch
from cases import DEVICE, Case
from harness import kernels
from harness.features import Features
from ingredients import document_bounds, random_lengths, two_intervals

# Head dims of every kernel, and some between them, which run in the next larger one.
ALL_DIMS = sorted({*kernels.head_dims(kernels.default_library(), "fwd"), (8, 8), (72, 40), (128, 64), (200, 136)})
all_dims = pytest.mark.parametrize("dim, dim_v", ALL_DIMS)


def sink_of(heads, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, generator=generator).to(DEVICE, dtype)


def state_of(seed, offset=0):
    return torch.tensor([seed, offset], dtype=torch.int64, device=DEVICE)


def alibi(case, by_batch=False, **more):
    """ALiBi's slopes, one of them negative, beside other features."""
    shape = (case.batch, case.heads) if by_batch else (case.heads,)
    slopes = torch.rand(shape, generator=torch.Generator().manual_seed(case.seed)) / 8
    slopes[..., 0] *= -0.1
    offset = case.seqlen_k - case.seqlen_q if case.q_offset is None else case.q_offset
    rows = torch.arange(case.seqlen_q, device=DEVICE)[None] + offset if case.q_pos is None else case.q_pos
    keys = torch.arange(case.seqlen_k, device=DEVICE)[None] if case.k_pos is None else case.k_pos
    distances = (rows.double()[:, None, :, None] - keys.double()[:, None, None]).abs()
    return Features(alibi_slopes=slopes.to(DEVICE), distances=distances, **more)


FEATURES = {
    "sink": lambda case: Features(sink=sink_of(case.heads)),
    "sink of the tensors' dtype": lambda case: Features(sink=2 * sink_of(case.heads, case.dtype)),
    "softcap": lambda case: Features(softcap=2.0),
    "softcap above the scores": lambda case: Features(softcap=256.0),
    "dropout": lambda case: Features(dropout=0.2, state=state_of(5, -6)),
    "sink and softcap": lambda case: Features(sink=sink_of(case.heads), softcap=20.0),
    "sink and dropout": lambda case: Features(sink=sink_of(case.heads), dropout=0.5, state=state_of(2**62, 3)),
    "softcap and dropout": lambda case: Features(softcap=5.0, dropout=0.9, state=state_of(-1, 2**40)),
    "ALiBi": alibi,
    "ALiBi by batch entry, and softcap": lambda case: alibi(case, True, softcap=20.0),
    "all": lambda case: alibi(
        case, sink=sink_of(case.heads, case.dtype), softcap=30.0, dropout=0.1, state=state_of(77, 0)
    ),
}
every_feature = pytest.mark.parametrize("feature", FEATURES)


def causal_documents(case):
    lengths = random_lengths(case.seqlen_k, 5, seed=case.dim)
    return {"causal": True, "q_offset": 0, "bounds": document_bounds(lengths)}


MASKS = {
    "documents": causal_documents,
    "two intervals": lambda case: {"bounds": two_intervals(case.seqlen_q, case.seqlen_k, case.dim, case.heads_kv)},
    "window and blind rows": lambda case: {"causal": True, "window": (70, -1), "q_offset": -90},
    "none": lambda case: {},
}


def featured(feature, mask="none", **fields):
    """A case with that feature and mask."""
    case = Case(**fields)
    for name, value in MASKS[mask](case).items():
        setattr(case, name, value)
    case.features = FEATURES[feature](case)
    return case
