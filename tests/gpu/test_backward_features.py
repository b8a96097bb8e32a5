# SPDX-License-Identifier: Apache-2.0
"""Softcap, sinks and dropout in the backward pass: against float64, and bit for bit against itself."""

import dataclasses

import pytest
import torch
from cases import (
    DEVICE,
    Case,
    assert_same_gradients,
    call,
    call_backward,
    check_backward,
    check_gradients,
    gradient_inputs,
    same_bits,
)
from feature_cases import FEATURES, MASKS, all_dims, every_feature, featured, sink_of, state_of
from harness.calls import Plan, explained
from harness.features import Features
from ingredients import F16, adversarial, dims, document_bounds, ints, types
from random_cases import random_case

PER_GROUP, GROUPS = 15, 6


def gradients_of(case, **more):
    """(forward, dout, dlse, backward), both calls run."""
    forward = call(case, case.mask()).run()
    dout, dlse = gradient_inputs(case)
    return forward, dout, dlse, call_backward(case, forward, dout, dlse, **more).run()


@every_feature
@types
@all_dims
def test_against_float64(feature, dtype, dim, dim_v):
    for n, mask in enumerate(MASKS):
        heads, heads_kv = ((4, 2), (6, 1), (3, 3), (4, 4))[n]
        shape = {"seqlen_q": 300, "seqlen_k": 261, "batch": 2, "heads": heads, "heads_kv": heads_kv}
        check_backward(featured(feature, mask, **shape, dim=dim, dim_v=dim_v, dtype=dtype), with_dlse=n % 2 == 0)


@pytest.mark.cuda
@every_feature
@all_dims
def test_calls_that_fill_the_device(feature, dim, dim_v):
    """Work tiles with all query heads of their key head, and more than one of them for each CTA."""
    shape = {"seqlen_q": 900, "seqlen_k": 1100, "batch": 2, "heads": 32, "heads_kv": 16}
    check_backward(featured(feature, "two intervals", **shape, dim=dim, dim_v=dim_v), dense=False)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_masks_and_features(group):
    names = sorted(FEATURES)
    for seed in range(group * PER_GROUP, (group + 1) * PER_GROUP):
        case = random_case(seed)
        case.features = FEATURES[names[seed % len(names)]](case)
        check_backward(case, with_dlse=seed % 3 != 0)


@dims
@pytest.mark.parametrize("kind", ["large", "outlier", "overtaken", "very negative"])
@pytest.mark.parametrize("feature", ["softcap", "sink and softcap", "dropout"])
def test_scores_that_are_hard_on_a_softmax(feature, kind, dim):
    case = featured(feature, seqlen_q=200, seqlen_k=800, heads=2, dim=dim, causal=True, scale=1.0)
    check_backward(dataclasses.replace(case, inputs=adversarial(kind, case)))


@types
@dims
@pytest.mark.parametrize("softcap", [1e-18, 1e-3, 0.5, 30.0, 256.0])
def test_softcaps_of_every_size(softcap, dtype, dim):
    check_backward(Case(200, 300, heads=2, heads_kv=1, dim=dim, dtype=dtype, features=Features(softcap=softcap)))


@types
@all_dims
def test_the_sink_of_rows_that_see_nothing(dtype, dim, dim_v):
    """Their weight goes to the sink alone: its gradient has what dlse brings, dq is 0."""
    sink = sink_of(4, dtype)
    for seqlen_k, options in ((300, {"causal": True, "q_offset": -290}), (300, {"window": (0, 0)})):
        check_backward(
            Case(600, seqlen_k, heads=4, dim=dim, dim_v=dim_v, dtype=dtype, features=Features(sink=sink), **options)
        )


@dims
def test_sinks_out_of_reach(dim):
    """-inf is none and has the gradient 0; one far above all scores takes all the weight."""
    sinks = torch.tensor([float("-inf"), -1e4, 1e4, 3e38], device=DEVICE)
    case = Case(300, 300, heads=4, heads_kv=4, dim=dim, causal=True, features=Features(sink=sinks))
    _, _, dlse, ours = gradients_of(case)
    _, _, _, plain = gradients_of(dataclasses.replace(case, features=Features()))
    for head in (0, 1):
        for name in ("dq", "dk", "dv"):
            got, want = (getattr(x, name)[:, :, head].float() for x in (ours, plain))
            assert float((got - want).abs().max()) <= 2**-6 * float(want.abs().max()), name
    assert bool((ours.dsink[:2] == 0).all())
    for head in (2, 3):
        assert all(bool((getattr(ours, name)[:, :, head] == 0).all()) for name in ("dq", "dk", "dv"))
        want = dlse[:, head].double().sum()
        assert abs(float(ours.dsink[head] - want)) <= 1e-5 * float(dlse[:, head].abs().sum())


@dims
@pytest.mark.parametrize("feature", ["softcap", "all"])
def test_the_same_bits_in_any_number_of_ctas(feature, dim):
    case = featured(feature, "documents", seqlen_q=900, seqlen_k=900, batch=2, heads=8, heads_kv=2, dim=dim)
    forward, dout, dlse, ours = gradients_of(case, deterministic=True)
    for ctas in (1, 3, 100):
        other = call_backward(case, forward, dout, dlse, deterministic=True, max_ctas=ctas).run()
        assert_same_gradients(ours, other, f"in {ctas} CTAs", case)


@dims
@pytest.mark.parametrize("layout", ["bhsd", "padded"])
def test_layouts(layout, dim):
    case = featured("all", "documents", seqlen_q=300, seqlen_k=300, batch=2, heads=4, dim=dim, dtype=F16, layout=layout)
    check_backward(case)


@types
@all_dims
def test_features_over_positions(dtype, dim, dim_v):
    """The window compares positions of a packed tree."""
    positions = torch.cat([torch.arange(150), torch.arange(60, 120), torch.arange(100, 190)])
    positions = ints(positions.numpy())[None]
    for feature in ("softcap", "ALiBi", "sink and dropout", "softcap and dropout"):
        case = Case(
            300, 300, batch=2, heads=4, heads_kv=2, dim=dim, dim_v=dim_v, dtype=dtype, causal=True, window=(40, 0)
        )
        case.q_pos = case.k_pos = positions
        case.features = FEATURES[feature](case)
        check_backward(case)


@pytest.mark.cuda
@pytest.mark.parametrize("own_plan", [False, True])
def test_a_graph_reads_sinks_and_states_when_it_is_replayed(own_plan):
    case = featured("all", "documents", seqlen_q=700, seqlen_k=700, heads=4, dim=128)
    mask = case.mask()
    plan = None if own_plan else Plan(mask)
    forward = call(case, mask, plan=plan)
    dout, dlse = gradient_inputs(case)
    captured = call_backward(case, forward, dout, dlse, plan=plan, deterministic=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward.run()
        captured.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward.run()
        captured.run()
    seen = []
    for seed in range(3):
        case.features.state.copy_(state_of(seed, 9))
        case.features.sink.normal_()
        captured.poison()
        graph.replay()
        torch.cuda.synchronize()
        check_gradients(case, forward, dout, dlse, captured)
        seen.append(captured.dv.clone())
    assert not same_bits(seen[0], seen[1])


@pytest.mark.cuda
@all_dims
def test_explain_names_the_kernel(dim, dim_v):
    """Scores and dropout have kernels of their own, and Hopper's scores without dropout others; a sink's weight is in
    lse, so that the plain ones do."""
    for feature in FEATURES:
        case = featured(feature, seqlen_q=4096, seqlen_k=4096, batch=2, heads=16, dim=dim, dim_v=dim_v)
        forward, dout, dlse, ours = gradients_of(case)
        got = explained(ours, True)
        features = case.features
        drops = bool(features.dropout)
        scored = bool(features.softcap or features.alibi_slopes is not None) or drops
        assert (".score" in got["instance"]) == scored, got
        assert (".dropout" in got["instance"]) == (drops if got["instance"].startswith("sm90") else scored), got
        assert any(name.endswith("dsink") for name in got["kernels"]) == (case.features.sink is not None), got


@dims
def test_documents_do_not_touch_each_other(dim):
    """Hidden elements make no result NaN: gradients of one document do not depend on another's q and dout."""
    case = featured(
        "all", seqlen_q=300, seqlen_k=300, heads=2, dim=dim, causal=True, bounds=document_bounds([101, 199])
    )
    _, dout, _, before = gradients_of(case, deterministic=True)
    q, k, v = (x.clone() for x in case.tensors())
    q[:, 101:] *= 3
    _, _, _, ours = gradients_of(dataclasses.replace(case, inputs=(q, k, v)), deterministic=True)
    for name in ("dq", "dk", "dv"):
        of_ours, of_before = (getattr(x, name)[:, :101] for x in (ours, before))
        assert same_bits(of_ours, of_before), f"{name}: {int((of_ours != of_before).sum())} values differ"
