# SPDX-License-Identifier: Apache-2.0
"""The accuracy rule of harness.oracle, in the places where docs/decisions/gradient-accuracy.md makes it precise."""

import pytest
import torch
from harness import oracle
from harness.features import Features

ROWS, KEYS, DIM = 12, 16, 32


class Halved(Features):
    """Dropout that leaves every weight, so that no library is asked for a mask."""

    def factors(self, batch, heads, seqlen_q, seqlen_k):
        return torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64)


def errors_of(change, rows_that_see=ROWS, features=None):
    """Errors of an exact out, rounded once, that `change` has changed in place; two heads."""
    torch.manual_seed(0)
    features = features or Features()
    q, k, v = (torch.randn(1, n, 2, DIM).half() for n in (ROWS, KEYS, KEYS))
    seen = torch.arange(ROWS)[None, None, :, None] < rows_that_see
    visible = lambda rows: seen[:, :, rows].expand(1, 1, len(rows), KEYS)
    factors = features.factors(1, 2, ROWS, KEYS)
    exact, lse = oracle.attend(
        *(x.transpose(1, 2) for x in (q, k, v)), visible(torch.arange(ROWS)), 0.2, features, factors
    )
    out = exact.half()
    change(out)
    return oracle.errors(q, k, v, out.transpose(1, 2), lse, visible, 0.2, features=features)


def nothing(out):
    pass


def test_half_a_unit_in_the_last_place():
    values = torch.tensor([0.0, 1.0, 1.9, 2.0, -4.1, 1e-9])
    assert (oracle.half_unit_of(values, torch.float16) * 2**11).tolist() == [0, 1, 1, 2, 4, 2**-14]
    assert (oracle.half_unit_of(values[:4], torch.bfloat16) * 2**8).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("features", [Features(), Halved(dropout=0.5)])
def test_an_exact_out_obeys_the_rule_and_one_far_off_does_not(features):
    assert not list(oracle.complaints(errors_of(nothing, features=features)))
    (complaint,) = oracle.complaints(errors_of(lambda out: out[0, 1, 3].add_(0.05), features=features))
    assert "out is off by" in complaint and "(batch x head 1)" in complaint


def test_dropout_has_the_rounding_of_the_largest_number(monkeypatch):
    """A plain implementation that was lucky in every number is no measure."""
    lucky = lambda *given: oracle.attend(*given)[0]
    monkeypatch.setattr(oracle, "attend_plain", lucky)
    found = errors_of(nothing, features=Halved(dropout=0.5))
    assert bool((found["out"] <= found["plain"]).all()) and float(found["plain"].min()) >= 2**-12
    assert float(errors_of(nothing)["plain"].max()) == 0


def test_heads_of_few_rows_with_numbers_are_judged_together():
    few, many = errors_of(nothing, rows_that_see=oracle.FEW_ROWS - 1), errors_of(nothing)
    assert few["plain"].unique().numel() == 1 and many["plain"].unique().numel() == 2
