# SPDX-License-Identifier: Apache-2.0
"""explain names what runs, why something does not, and the nearest call that does; it never raises for the call."""

import flashmask
import pytest
import torch
from dense_reference import assert_close
from devices import DEVICE, DTYPE, ON_CUDA, cpu_only, tolerance_of
from flashmask import capi
from flashmask._core import explanation

NAME = str(DTYPE).removeprefix("torch.")
BACKEND = DEVICE.type


def make(seqlen=300, dim=64, dtype=DTYPE, dim_v=None):
    return [
        torch.zeros(2, seqlen, heads, d, dtype=dtype, device=DEVICE)
        for heads, d in ((4, dim), (2, dim), (2, dim_v or dim))
    ]


def test_what_runs():
    text = flashmask.explain(*make(), causal=True, window_size=(9, -1))
    for line in (
        f"query     [2, 300, 4, 64] {NAME} on {DEVICE}",
        "mask      causal; window of 9 keys before and any after the row's own; row 0 at key 0",
        "tiles     9 of 128x128: 0 full, 5 partial, 4 skipped",
        f"forward   backend: {BACKEND}",
        "plan given",
        "backward  not needed",
    ):
        assert line in text, text


@pytest.mark.parametrize(
    "causal,vectors,names",
    [(True, 1, "LTS of"), (True, 2, "LTS, LTE of"), (False, 2, "LTS, UTE of"), (False, 4, "LTS, LTE, UTS, UTE of")],
)
def test_bounds(causal, vectors, names):
    bounds = torch.zeros(1, 2, 300, vectors, dtype=torch.int32, device=DEVICE)
    assert names + " each key, batch 1, heads 2" in flashmask.explain(*make(), bounds, causal=causal)


def test_what_is_executed_agrees_with_the_plan():
    """On the CPU 9 of 11 x 6 tiles of 64 x 128 are live: rows and keys below 300, not above the diagonal; 8 heads.

    On CUDA the plan is not read, and tiles have 128 rows: 8 x 36.
    """
    mask = flashmask.Mask(
        700, 700, bounds=torch.full((1, 1, 700, 1), 300, dtype=torch.int32, device=DEVICE), causal=True
    )
    text = flashmask.explain(*make(700), mask)
    assert "36 of 128x128: 1 full, 5 partial, 30 skipped" in text
    assert ("unknown (the mask is on the device) of 288 of 128x128" if ON_CUDA else "72 of 528") in text


def test_no_mask():
    assert "none: every row sees every key" in flashmask.explain(*make())


def test_layouts_agree():
    bhsd = flashmask.explain(*(x.transpose(1, 2) for x in make()), layout="bhsd")
    assert bhsd == flashmask.explain(*make())


def test_backward():
    q, k, v = make()
    text = flashmask.explain(q.requires_grad_(), k, v, deterministic=True)
    forward, backward = text[text.index("forward ") :].split("backward  ")
    backend = "backend: cuda" if ON_CUDA else "backend: cpu"
    assert backend in forward and backward.startswith(backend)
    assert "workspace: " in backward and "the same bits in every run" in backward


@pytest.mark.parametrize(
    "dtype,backend,nearest",
    [
        (torch.float32, "auto", "cast query, key and value to bfloat16"),
        (torch.bfloat16, "reference", "leave backend at 'auto'"),
        (torch.float64, "reference", "move everything to the CPU"),
    ]
    if ON_CUDA
    else [
        (torch.float64, "auto", "cast query, key and value to float32"),
        (torch.float32, "cuda", "leave backend at 'auto'"),
        (torch.float64, "cuda", "pass backend='reference' (slow)"),
    ],
)
def test_the_nearest_call(dtype, backend, nearest):
    text = flashmask.explain(*make(dtype=dtype), backend=backend)
    assert "forward   refused: no backend takes this call" in text and text.endswith("nearest   " + nearest), text


def test_padding_is_proposed(monkeypatch):
    """Simulates a device that takes bfloat16 of head_dim 128 only."""
    taken = lambda call, struct: (
        "" if call.q.dtype == "bfloat16" and call.q.shape[3] == call.v.shape[3] == 128 else "not taken"
    )
    monkeypatch.setattr(explanation, "refusal", taken)
    monkeypatch.setattr(explanation, "_head_dims", lambda: [64, 128])  # also where the library is built without CUDA
    text = flashmask.explain(*make(dim=80, dtype=torch.float32, dim_v=40))
    assert text.endswith(
        "nearest   cast query, key and value to bfloat16; pad head_dim with zeros to 128, "
        "pass softmax_scale=80**-0.5 and cut the result to head_dim_v"
    ), text


def test_padding_changes_nothing():
    inputs = [torch.randn_like(x) for x in make(40, 24, dim_v=16)]
    padded = [torch.nn.functional.pad(x, (0, 64 - x.shape[3])) for x in inputs]
    out = flashmask.flashmask_attention(*padded, causal=True, softmax_scale=24**-0.5)[..., :16]
    on_cpu = [x.cpu().float() for x in inputs]
    assert_close(
        out.cpu(),
        flashmask.flashmask_attention(*on_cpu, causal=True, backend="reference"),
        tolerance=tolerance_of("out", DTYPE),
    )


def test_nothing_is_near():
    assert flashmask.explain(*make(dim=300)).endswith("nearest   none")


@pytest.mark.parametrize(
    "arguments,why",
    [
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"softcap": -30.0}, "softcap is -30"),
        ({"sink": torch.zeros(3, device=DEVICE)}, "sink is "),
        ({"sink": 4}, "sink is 4 (int)"),
        ({"sink": torch.zeros(4, device="meta")}, "sink is on meta"),
        (
            {"dropout": 0.1, "dropout_state": torch.zeros(2, dtype=torch.int64, device="meta")},
            "dropout_state is on meta",
        ),
        ({"k_pos": torch.zeros(1, 4)}, "q_pos is None and k_pos is given"),
        ({"q_pos": torch.zeros(1, 4), "k_pos": torch.zeros(1, 4)}, "q_pos is torch.float32 [1, 4]"),
        ({"max_ctas": -1}, "max_ctas is -1"),
        ({"layout": "sbhd"}, "layout"),
        ({"window_size": (-2, 0)}, "window_size"),
        ({"startend_row_indices": torch.zeros(1, 1, 9, 2, dtype=torch.int32, device=DEVICE)}, "9"),
        ({"startend_row_indices": flashmask.Mask(8, 8)}, "8"),
        ({"startend_row_indices": 3}, "int"),
    ],
)
def test_wrong_calls_are_texts_too(arguments, why):
    q, k, v = make()
    text = flashmask.explain(q, k, v, **arguments)
    assert text.startswith("refused   ") and why in text
    with pytest.raises(Exception) as raised:
        flashmask.flashmask_attention(q, k, v, **arguments)
    assert str(raised.value) == text.removeprefix("refused   ")


def test_wrong_tensors():
    q, k, v = make()
    assert f"refused   k is {NAME} [2, 300, 2, 32]" in flashmask.explain(q, k[..., :32], v)
    assert "refused   q is int32" in flashmask.explain(q.int(), k.int(), v.int())
    assert "refused   q is int16 [2, 300, 4, 64]" in flashmask.explain(q.short(), k.short(), v.short())


@cpu_only("what is near on CUDA is the CPU")
def test_backward_that_is_refused(monkeypatch):
    refusal = explanation.refusal
    monkeypatch.setattr(
        explanation,
        "refusal",
        lambda call, struct: (
            "not yet" if struct is capi.BackwardArgs and call.options["backend"] == "auto" else refusal(call, struct)
        ),
    )
    q, k, v = make()
    assert flashmask.explain(q.requires_grad_(), k, v).endswith(
        "backward  refused: not yet\nnearest   pass backend='reference' (slow)"
    )
