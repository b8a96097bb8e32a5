# SPDX-License-Identifier: Apache-2.0
"""Softcap, sinks and dropout in the forward pass: against float64, and dropout's pattern bit for bit."""

import dataclasses

import pytest
import torch
from cases import DEVICE, Case, assert_same, call, check, same_bits
from feature_cases import FEATURES, MASKS, all_dims, every_feature, featured, sink_of, state_of
from harness.calls import Plan, explained
from harness.features import Features
from ingredients import BF16, F16, FORWARD_DIMS, adversarial, document_bounds, forward_dims, types
from random_cases import random_case

PER_GROUP, GROUPS = 20, 6


# --- Accuracy -------------------------------------------------------------------------------------------


@every_feature
@types
@all_dims
def test_against_float64(feature, dtype, dim, dim_v):
    for n, mask in enumerate(MASKS):
        heads, heads_kv = ((4, 2), (6, 1), (3, 3), (4, 4))[n]
        shape = {"seqlen_q": 300, "seqlen_k": 261, "batch": 2, "heads": heads, "heads_kv": heads_kv}
        check(featured(feature, mask, **shape, dim=dim, dim_v=dim_v, dtype=dtype))


@every_feature
@all_dims
def test_calls_that_fill_the_device(feature, dim, dim_v):
    """Rows of the tallest tiles, some long enough for P V under the next tile's softmax, and more than one tile for
    each CTA."""
    shape = {"seqlen_q": 1750, "seqlen_k": 1100, "batch": 2, "heads": 16, "heads_kv": 4}
    check(featured(feature, "two intervals", **shape, dim=dim, dim_v=dim_v), dense=False)


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_masks_and_features(group):
    names = sorted(FEATURES)
    for seed in range(group * PER_GROUP, (group + 1) * PER_GROUP):
        case = random_case(seed, FORWARD_DIMS)
        case.features = FEATURES[names[seed % len(names)]](case)
        check(case)


@forward_dims
@pytest.mark.parametrize("kind", ["large", "growing", "falling", "constant", "outlier", "overtaken", "very negative"])
@pytest.mark.parametrize("feature", ["softcap", "sink and softcap", "softcap above the scores", "sink", "dropout"])
def test_scores_that_are_hard_on_a_softmax(feature, kind, dim):
    """Up to 1e4, which a softcap of 2 flattens to its ends."""
    case = featured(feature, seqlen_q=200, seqlen_k=800, heads=2, dim=dim, causal=True, scale=1.0)
    check(dataclasses.replace(case, inputs=adversarial(kind, case)))


@types
@forward_dims
@pytest.mark.parametrize("softcap", [1e-18, 1e-3, 0.5, 30.0, 256.0])
def test_softcaps_of_every_size(softcap, dtype, dim):
    """One key gives lse = its score."""
    case = Case(256, 1, heads=2, heads_kv=1, dim=dim, dtype=dtype, features=Features(softcap=softcap))
    q, k, _ = case.tensors()
    for scale in (1e-4, 0.01, 1.0, 40.0):
        lse = call(dataclasses.replace(case, scale=scale), case.mask()).run().lse.double()
        scores = scale * (q.double() * k.double()).sum(-1).transpose(1, 2)
        want = softcap * torch.tanh(scores / softcap)
        # The hardware's tanh, or float16's; beside it what float32 products lose, some units of the last place of their
        # terms.
        of_tanh = 4e-5 if dtype == F16 else 2**-10.9
        terms = scale * (q.double() * k.double()).abs().sum(-1).transpose(1, 2)
        allowed = of_tanh * want.abs() + 2**-20 * terms
        assert bool(((lse - want).abs() <= allowed).all()), (scale, float((lse - want).abs().max()))


# --- Rows that see nothing, and values that are no numbers ------------------------------------------------


@types
@all_dims
def test_the_sink_of_rows_that_see_nothing(dtype, dim, dim_v):
    """out is 0 and lse the sink, of rows in tiles with others, in skipped tiles, and where there are no keys."""
    sink = sink_of(4, dtype)
    for seqlen_k, options in ((300, {"causal": True, "q_offset": -290}), (0, {}), (300, {"window": (0, 0)})):
        case = Case(600, seqlen_k, heads=4, dim=dim, dim_v=dim_v, dtype=dtype, features=Features(sink=sink), **options)
        ours = check(case, dense=seqlen_k > 0) if seqlen_k else call(case, case.mask()).run()
        seen = case.visible(case.rows()).any(-1)[0, 0]
        blind = ~seen if seqlen_k else torch.ones_like(seen)
        assert bool(blind.any())
        assert bool((ours.out[:, blind] == 0).all())
        assert torch.equal(ours.lse[0][:, blind], sink.float()[:, None].expand(-1, int(blind.sum())))


@forward_dims
def test_no_sink_and_sinks_out_of_reach(dim):
    """-inf is none; one far above all scores takes all the weight, one far below none of it."""
    case = Case(300, 300, heads=4, dim=dim, causal=True, bounds=document_bounds([100, 200]))
    plain = check(case)
    sinks = torch.tensor([float("-inf"), -1e4, 1e4, 3e38], device=DEVICE)
    ours = call(dataclasses.replace(case, features=Features(sink=sinks)), case.mask()).run()
    for head in (0, 1):
        assert float((ours.lse[:, head] - plain.lse[:, head]).abs().max()) <= 1e-5
        gap = (ours.out[:, :, head].float() - plain.out[:, :, head].float()).abs().max()
        assert float(gap) <= 2**-7 * float(plain.out.float().abs().max())
    for head in (2, 3):
        assert bool((ours.lse[:, head] == sinks[head]).all()) and bool((ours.out[:, :, head] == 0).all())


@forward_dims
@pytest.mark.parametrize("feature", ["softcap", "softcap above the scores", "sink and dropout"])
def test_nan_stays_where_it_is_visible(feature, dim):
    """A row of q that is NaN has results that are NaN, and no other has; a hidden key that is NaN, beside a visible
    one, changes nothing."""
    case = featured(feature, seqlen_q=300, seqlen_k=300, heads=2, dim=dim, causal=True)
    case.bounds = document_bounds([101, 199])
    before = call(case, case.mask()).run()
    q, k, v = (x.clone() for x in case.tensors())
    q[:, 50] = float("nan")
    other = dataclasses.replace(case, inputs=(q, k, v))
    ours = call(other, other.mask()).run()
    others = torch.arange(300, device=DEVICE) != 50
    assert bool(ours.lse[:, :, 50].isnan().all()) and bool(ours.out[:, 50].isnan().any(-1).all())
    assert same_bits(ours.out[:, others], before.out[:, others])
    assert same_bits(ours.lse[:, :, others], before.lse[:, :, others])
    k[:, 101] = float("nan")
    other = dataclasses.replace(case, inputs=(case.tensors()[0], k, v))
    ours = call(other, other.mask()).run()
    assert same_bits(ours.out[:, :101], before.out[:, :101]) and same_bits(ours.lse[:, :, :101], before.lse[:, :, :101])
    assert bool(ours.lse[:, :, 101:].isnan().all())


# --- Dropout's pattern --------------------------------------------------------------------------------------


def kept_by(case):
    """Weights that a call keeps, bool [batch, heads, rows, keys]: with q = 0 all weights are equal, and v shows for
    dim_v keys at a time which of them an output has."""
    q, k, v = case.tensors()
    parts = []
    for begin in range(0, case.seqlen_k, case.dim_v):
        keys = torch.arange(begin, min(begin + case.dim_v, case.seqlen_k), device=DEVICE)
        one_each = torch.zeros_like(v)
        one_each[:, keys, :, keys - begin] = 1
        part = dataclasses.replace(case, inputs=(torch.zeros_like(q), k, one_each))
        out = call(part, part.mask()).run().out[..., : len(keys)]
        factor = 1 / (1 - round(case.features.dropout * 65536) / 65536)
        assert bool(((out == 0) | ((out.double() * case.seqlen_k / factor - 1).abs() < 0.01)).all())
        parts.append((out != 0).transpose(1, 2))
    return torch.cat(parts, -1)


@types
@all_dims
def test_the_pattern_bit_for_bit(dtype, dim, dim_v):
    """Against the library's on the CPU, for tiles that begin and end anywhere, every head and every batch entry."""
    for p, state in ((0.1, state_of(2**63 - 1, -(2**63))), (0.5, state_of(0)), (0.97, state_of(3, 2**33))):
        features = Features(dropout=p, state=state)
        case = Case(
            300,
            280,
            batch=2,
            heads=3,
            heads_kv=1,
            dim=dim,
            dim_v=dim_v,
            dtype=dtype,
            features=features,
            seed=int(9 * p),
        )
        want = features.factors(2, 3, 300, 280) != 0
        assert torch.equal(kept_by(case), want), f"{int((kept_by(case) != want).sum())} weights differ; {case}"


@forward_dims
def test_the_pattern_of_calls_that_fill_the_device(dim):
    features = Features(dropout=0.3, state=state_of(11, 12))
    case = Case(1500, 700, batch=2, heads=18, heads_kv=2, dim=dim, features=features)
    assert torch.equal(kept_by(case), features.factors(2, 18, 1500, 700) != 0)


@forward_dims
def test_the_pattern_depends_on_nothing_else(dim):
    """Not on the number of CTAs, nor on the mask: with another one, the same of the weights that both see are kept."""
    features = Features(dropout=0.4, state=state_of(4))
    case = Case(500, 500, heads=4, dim=dim, causal=True, features=features)
    whole = call(case, case.mask()).run()
    for ctas in (1, 3):
        assert_same(whole, call(case, case.mask(), max_ctas=ctas).run(), f"in {ctas} CTAs", case)
    documents = dataclasses.replace(case, bounds=document_bounds([200, 300]))
    parted = call(documents, documents.mask()).run()
    assert same_bits(whole.out[:, :200], parted.out[:, :200])


# --- Graphs, and who runs them ------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("own_plan", [False, True])
def test_a_graph_reads_sinks_and_states_when_it_is_replayed(own_plan):
    case = featured("all", "documents", seqlen_q=700, seqlen_k=700, heads=4, dim=128)
    mask = case.mask()
    captured = call(case, mask, plan=None if own_plan else Plan(mask))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    seen = []
    for seed in range(3):
        case.features.state.copy_(state_of(seed, 9))
        case.features.sink.normal_()
        captured.poison()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(call(case, mask).run(), captured, f"replay {seed}", case)
        seen.append(captured.out.clone())
    assert not same_bits(seen[0], seen[1])


@pytest.mark.cuda
@all_dims
def test_explain_names_the_kernel(dim, dim_v):
    """Softcap and dropout have kernels of their own, Hopper's dropout one of two consumer warpgroups; so have sinks."""
    shape = {"seqlen_q": 4096, "seqlen_k": 4096, "batch": 4, "heads": 16, "dim": dim, "dim_v": dim_v}
    for feature in FEATURES:
        case = featured(feature, **shape)
        got = explained(call(case, case.mask()), False)
        hopper = got["arch"] == "sm90"
        has_scores = case.features.softcap or case.features.alibi_slopes is not None
        changes_loop = has_scores or case.features.dropout or not hopper
        assert got["instance"].startswith(f"{got['arch']}.fwd.bf16.") and got["instance"].endswith(".sink.pos"), got
        assert (".score" in got["instance"]) == bool(changes_loop), got
        assert ".c2." in got["instance"] or not (hopper and case.features.dropout), got
    case = Case(**shape)
    assert explained(call(case, case.mask()), False)["instance"].count(".") == 5


@forward_dims
@pytest.mark.parametrize("layout", ["bhsd", "padded"])
def test_layouts(layout, dim):
    """Sinks may have any stride."""
    case = featured("all", "documents", seqlen_q=300, seqlen_k=300, batch=2, heads=4, dim=dim, dtype=F16, layout=layout)
    strided = check(case)
    contiguous = dataclasses.replace(case, layout="bshd", inputs=tuple(x.contiguous() for x in case.tensors()))
    apart = torch.stack((case.features.sink, torch.full_like(case.features.sink, 1e4)), 1)[:, 0]
    contiguous.features = dataclasses.replace(case.features, sink=apart)
    assert apart.stride() == (2,)
    assert_same(strided, call(contiguous, contiguous.mask()).run(), f"{layout} against contiguous", case)


@pytest.mark.cuda
def test_side_streams():
    case = featured("all", "documents", seqlen_q=1000, seqlen_k=1000, heads=8, heads_kv=8, dim=64, dtype=BF16)
    mask = case.mask()
    expected = call(case, mask).run()
    torch.cuda.synchronize()
    calls = []
    for stream in [torch.cuda.Stream() for _ in range(3)]:
        with torch.cuda.stream(stream):
            calls.append(call(case, mask).run())
    torch.cuda.synchronize()
    for other in calls:
        assert_same(expected, other, "on a side stream", case)
