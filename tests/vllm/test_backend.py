# SPDX-License-Identifier: Apache-2.0
"""The backend of examples/vllm in vLLM's own registry, layers, cache and metadata, against attention in float64."""

import types

import pytest
import torch
from flashmask import CachePlan, UnsupportedError
from serving import BLOCK, DEVICE, DIM, DTYPE, HEADS, Serving
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

load_general_plugins()
BACKEND = AttentionBackendEnum.CUSTOM.get_class()
HOPPER, ADA = DeviceCapability(9, 0), DeviceCapability(8, 9)
# New tokens of three requests, step by step: whole prompts and chunks, chunks beside single rows, decoding, drafts.
STEPS = [[40, 17, 1], [23, 1, 50], [1, 1, 1], [1, 1, 1], [4, 4, 4], [1, 30, 2]]
WINDOW = 24
LAYOUT = KVCacheLayout.LBNHC
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2.5e-3, torch.bfloat16: 2e-2}
TOLERANCE = TOLERANCES[DTYPE]


def reasons(capability=HOPPER, **asked):
    default = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    config = AttentionSelectorConfig(**default | asked)
    return BACKEND.validate_configuration(device_capability=capability, **config._asdict())


def test_plugin():
    """vLLM finds the package by its entry point, and the class by its registry."""
    assert BACKEND.__module__ == "flashmask_vllm.backend"
    assert AttentionBackendEnum[BACKEND.get_name()].get_class() is BACKEND


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"dtype": torch.float16, "head_size": 80},
        {"kv_cache_dtype": "bfloat16", "block_size": 64},
        {"kv_cache_dtype": "fp8"},
        {"has_sink": True, "has_sliding_window": True},
        {"use_mm_prefix": True},
        {"use_batch_invariant": True},
        {"use_kv_connector": True},
    ],
)
def test_accepted(asked):
    assert reasons(**asked) == []


@pytest.mark.parametrize(
    "asked, reason",
    [
        ({"head_size": 512}, "head_size not supported"),
        ({"head_size": 100}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 with torch.bfloat16 not supported"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"attn_type": "encoder_decoder"}, "attention type encoder_decoder not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"capability": DeviceCapability(7, 5)}, "compute capability not supported"),
        ({"capability": ADA, "use_batch_invariant": True}, "batch invariance not supported but on"),
        ({"kv_cache_dtype": "fp8", "use_batch_invariant": True}, "batch invariance with kv_cache_dtype fp8"),
    ],
)
def test_refused(asked, reason):
    (only,) = reasons(**asked)
    assert only.startswith(reason)


def check(serving, tolerance, steps=STEPS, padding=0):
    for rows in steps:
        for out, wanted in serving.step(rows, padding):
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance)


SINKS = torch.linspace(-1, 2, HEADS, device=DEVICE)
OPTIONS = {
    "plain": {},
    "window": {"per_layer_sliding_window": WINDOW},
    "softcap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": SINKS},
    "sinks and window": {"sinks": SINKS, "per_layer_sliding_window": WINDOW},
    "alibi": {"alibi_slopes": [2.0**-n for n in range(HEADS)]},
}


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda x: x.name)
def test_layouts(layout):
    check(Serving([{}, {}], layout), TOLERANCE)


@pytest.mark.parametrize("name", OPTIONS)
def test_layers(name):
    check(Serving([OPTIONS[name]], LAYOUT), TOLERANCE)


def test_layers_of_one_group():
    """Layers with and without a window share a group where vLLM's hybrid cache manager is off."""
    serving = Serving([OPTIONS[x] for x in ("plain", "window", "sinks", "window")], LAYOUT)
    check(serving, TOLERANCE)
    assert len(serving.builder.decode.made) == len(serving.builder.mixed.made) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    check(Serving([OPTIONS["window"]], LAYOUT, dtype), TOLERANCES[dtype])


# Spans of the first two requests: within chunks and whole prompts, next to one another, of one token; none in decoding.
SPANS = {0: [(3, 20), (21, 30), (35, 35), (45, 60)], 1: [(0, 16)]}


@pytest.mark.parametrize("ends_at_window", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW, 10])
def test_image_spans(window, ends_at_window):
    options = {"per_layer_sliding_window": window, "mm_prefix_clamp_sliding_window": ends_at_window}
    check(Serving([options], LAYOUT, spans=SPANS), TOLERANCE)


def test_cleared_image_spans():
    """Gemma 4's model clears spans, by the name mm_prefix_range, for layers that have none."""
    check(Serving([{}, OPTIONS["window"]], LAYOUT, spans=SPANS, clears_spans=True), TOLERANCE)


def test_padded_steps():
    """Steps padded for a graph have requests and rows of no tokens."""
    check(Serving([OPTIONS["window"]], LAYOUT), TOLERANCE, [[20, 30, 7], [1, 1, 1], [1, 1, 1]], padding=5)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="FLASHMASK_TEST_DEVICE is not cuda")
@pytest.mark.parametrize("padding", [0, 5])
def test_replayed_graphs(padding):
    """A graph captured at one step serves later ones: what differs is in the plans, which are updated outside it."""
    captured = {}

    def attend(layer, q, k, v, metadata, slots):
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
        if layer not in captured:
            held, out, graph = q.clone(), torch.empty_like(q), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer.impl.forward(layer, held, k, v, layer.kv_cache, metadata, out)
            captured[layer] = held, out, graph
        held, out, graph = captured[layer]
        held.copy_(q)
        graph.replay()
        return out.clone()

    serving = Serving([{}, OPTIONS["sinks and window"], {}], LAYOUT)
    check(serving, TOLERANCE, [[70, 17, 1]])
    for _ in range(20):
        for out, wanted in serving.step([1, 1, 1], padding, attend):
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE)


def test_float8():
    """A cache of e4m3, with a scale for keys and one for values, loses nothing but what storing does."""
    serving = Serving([{}, OPTIONS["sinks and window"]], LAYOUT, torch.bfloat16, "fp8")
    for layer in serving.layers:
        layer._k_scale.fill_(0.02)
        layer._v_scale.fill_(0.013)
    check(serving, 2e-2)


def test_one_plan_a_step(monkeypatch):
    """All layers share a plan, which is updated once, and steps that decode alone have their own."""
    updated = []
    update = CachePlan.update
    monkeypatch.setattr(CachePlan, "update", lambda plan, *x, **y: (updated.append(plan), update(plan, *x, **y)))
    serving = Serving([{}, {}, {}], LAYOUT)
    for rows in ([9, 9, 9], [1, 1, 1], [1, 1, 1], [1, 9, 1]):
        serving.step(rows)
    prefill, decode, again, mixed = updated
    assert prefill is mixed and decode is again and prefill is not decode


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", OPTIONS)
def test_shared_prefixes(name, padding):
    """Steps that decode alone read common blocks once; their plans are kept, and others are as ever."""
    serving = Serving([{}, OPTIONS[name]], LAYOUT, plugin={"shared_prefixes": True})
    check(serving, TOLERANCE, [[70, 0, 0]])
    serving.begin_alike()
    check(serving, TOLERANCE, [[3, 9, 1]])
    assert not serving.builder.shared
    check(serving, TOLERANCE, [[1, 1, 1]] * 20, padding)
    (shared,) = serving.builder.shared.values()
    blocks = sum(-(-x.tokens // BLOCK) for x in serving.requests) - 2 * (70 // BLOCK)
    assert (shared.forest._pages >= 0).sum() == blocks


def test_options():
    with pytest.raises(ValueError, match="flashmask has share=True; it takes shared_prefixes, a bool"):
        Serving([{}], LAYOUT, plugin={"share": True})


def test_refused_steps():
    serving = Serving([{}], LAYOUT)
    (layer,) = serving.layers
    x = torch.zeros(1, HEADS, DIM)
    with pytest.raises(UnsupportedError, match="output_scale is given"):
        layer.impl.forward(layer, x, x, x, layer.kv_cache, None, x, output_scale=torch.ones(1))
    rows = [1, 1, 1]
    serving.step(rows)
    common = serving.common(rows)
    with pytest.raises(UnsupportedError, match="causal is False; the backend of flashmask takes True"):
        serving.builder.build(0, common.replace(causal=False))


@pytest.mark.parametrize("has_spans, support", [(False, "UNIFORM_BATCH"), (True, "UNIFORM_SINGLE_TOKEN_DECODE")])
def test_graphs(has_spans, support):
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(is_mm_prefix_lm=has_spans))
    assert BACKEND.get_builder_cls().get_cudagraph_support(config, None) is AttentionCGSupport[support]
