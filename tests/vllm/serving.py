# SPDX-License-Identifier: Apache-2.0
"""vLLM's own layers, cache and step metadata around the backend, as its model runner makes them, on one device."""

import dataclasses
import itertools
import math
import os

import torch
from dense_attention import dense_attention, visible_keys
from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views, get_kv_quant_mode

HEADS, HEADS_KV, DIM = 8, 2, 64
DEVICE = torch.device(os.environ.get("FLASHMASK_TEST_DEVICE", "cpu"))
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.float16
REQUESTS = 3
BLOCK, BLOCKS = 16, 60
MAX_LEN = 256


@dataclasses.dataclass
class Request:
    """The tokens of a request so far: k and v of each layer [tokens, heads_kv, dim], and its blocks."""

    blocks: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    tokens: int = 0


def stored(x, scale):
    """x as a cache of float8 has it."""
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


class Serving:
    """A group of layers of one kind of cache.

    options: of each layer's Attention. spans: of requests, by number; clears_spans: as Gemma 4's model does. plugin:
    options of the plug-in.
    """

    def __init__(self, options, layout, dtype=DTYPE, cache_dtype="auto", spans=None, clears_spans=False, plugin=None):
        self.dtype, self.options, self.clears_spans = dtype, options, clears_spans
        self.config = VllmConfig(
            device_config=DeviceConfig(DEVICE.type),
            cache_config=CacheConfig(block_size=BLOCK, cache_dtype=cache_dtype),
            scheduler_config=SchedulerConfig.default_factory(max_num_seqs=8, max_num_batched_tokens=MAX_LEN),
            additional_config={"flashmask": plugin or {}},
        )
        self.names = [f"layers.{n}.attn" for n in range(len(options))]
        self.held = {}
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(self.config):
                self.layers = [self._layer(name, x) for name, x in zip(self.names, options)]
        finally:
            torch.set_default_dtype(default)
        spec = self._bind_caches(layout)
        builder = self.layers[0].get_attn_backend().get_builder_cls()
        self.builder = builder(spec, self.names, self.config, DEVICE)
        blocks = torch.randperm(BLOCKS - 1)[: REQUESTS * MAX_LEN // BLOCK].int() + 1  # block 0 is vLLM's own
        nothing = torch.empty(0, HEADS_KV, DIM, dtype=dtype)
        empty = [nothing] * len(options)
        self.requests = [Request(x, [*empty], [*empty]) for x in blocks.view(REQUESTS, -1)]
        for request, of_request in (spans or {}).items():
            self.requests[request].spans = of_request

    def _layer(self, name, options):
        backend = AttentionBackendEnum.CUSTOM.get_class()
        cache = self.config.cache_config
        return Attention(
            HEADS, DIM, DIM**-0.5, HEADS_KV, cache_config=cache, prefix=name, attn_backend=backend, **options
        )

    def _bind_caches(self, layout):
        """Gives each layer a view of one buffer, as the layout has them. Slots hold NaN until they are written."""
        spec = self.layers[0].get_kv_cache_spec(self.config)
        cache_dtype = self.config.cache_config.cache_dtype
        spec = dataclasses.replace(
            spec,
            block_size=BLOCK,
            dtype=self.dtype if cache_dtype == "auto" else spec.dtype,
            kv_quant_mode=get_kv_quant_mode(cache_dtype),
        )
        layers = len(self.layers)
        layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, layers, layout)
        raw = torch.zeros(layers * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
        if cache_dtype == "auto":
            raw.view(self.dtype).fill_(float("nan"))
        placement = KVCacheTensor(raw.numel(), self.names, layer_stride, block_stride)
        for layer, view in zip(self.layers, create_kv_cache_views(raw, spec, BLOCKS, layout, placement)):
            layer.kv_cache = view
        return spec

    def begin_alike(self):
        """Has all requests begin with the whole blocks of the first, as vLLM's prefix cache does. Slots hold zeros
        until they are written, as vLLM's do."""
        for layer in self.layers:
            layer.kv_cache.nan_to_num_(0)
        first, *others = self.requests
        blocks = first.tokens // BLOCK
        for request in others:
            request.tokens = blocks * BLOCK
            request.blocks[:blocks] = first.blocks[:blocks]
            request.k, request.v = ([x[: request.tokens] for x in of_layers] for of_layers in (first.k, first.v))

    def step(self, rows, padding=0, attend=None):
        """Runs a step of so many new tokens of each request and returns (out, wanted) of each layer.

        padding: tokens, and as many requests of none, that pad the step as for a captured graph.
        attend(layer, q, k, v, metadata, slots): runs a layer; None: the layer's own forward.
        """
        for request, n in zip(self.requests, rows):
            request.tokens += n
        metadata = self.builder.build(0, self.common(rows, padding))
        if self.clears_spans:
            metadata.mm_prefix_range = None
        results, tokens = [], sum(rows)
        for n, (layer, options) in enumerate(zip(self.layers, self.options)):
            q, k, v = (torch.randn(tokens + padding, h, DIM).to(self.dtype) for h in (HEADS, HEADS_KV, HEADS_KV))
            out = (attend or self._attend)(layer, q, k, v, metadata, self._slots(rows))
            results.append((out[:tokens], self._wanted(n, options, rows, q, k, v)))
        return results

    def _attend(self, layer, q, k, v, metadata, slots):
        name = layer.layer_name
        with torch.no_grad(), set_forward_context({name: metadata}, self.config, slot_mapping={name: slots}):
            return layer(q.flatten(1), k.flatten(1), v.flatten(1)).unflatten(1, (HEADS, DIM))

    def common(self, rows, padding=0):
        """vLLM's metadata of a step, of which the requests have their new tokens already."""
        batch = len(rows) + padding
        starts = self._held(
            "starts", torch.tensor([0, *itertools.accumulate([*rows, *[0] * padding])], dtype=torch.int32)
        )
        lengths = torch.tensor([x.tokens for x in self.requests] + [0] * padding, dtype=torch.int32)
        table = torch.zeros(batch, MAX_LEN // BLOCK, dtype=torch.int32)
        for n, request in enumerate(self.requests):
            live = math.ceil(request.tokens / BLOCK)
            table[n, :live] = request.blocks[:live]
        lengths, table = self._held("lengths", lengths), self._held("table", table)
        spans = {n: x.spans for n, x in enumerate(self.requests)}
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths.cpu(),
            num_reqs=batch,
            num_actual_tokens=sum(rows) + padding,
            max_query_len=max(rows),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=self._slots(rows),
            mm_req_doc_ranges=spans if any(spans.values()) else None,
        )

    def _held(self, name, values):
        """The tensor of this name and shape, with these values: vLLM's runner keeps its tensors, which graphs hold."""
        return self.held.setdefault((name, values.shape), torch.empty_like(values)).copy_(values)

    def _slots(self, rows):
        slots = []
        for request, n in zip(self.requests, rows):
            token = torch.arange(request.tokens - n, request.tokens)
            slots.append(request.blocks[token // BLOCK].long() * BLOCK + token % BLOCK)
        return torch.cat(slots)

    def _wanted(self, n, options, rows, q, k, v):
        wanted, layer = [], self.layers[n]
        if layer.kv_cache_dtype == "fp8":
            k, v = stored(k, layer._k_scale), stored(v, layer._v_scale)
        ends = list(itertools.accumulate(rows))
        for request, end, count in zip(self.requests, ends, rows):
            new = slice(end - count, end)
            request.k[n], request.v[n] = torch.cat((request.k[n], k[new])), torch.cat((request.v[n], v[new]))
            visible = visible_keys(
                (request.tokens - count, request.tokens),
                options.get("per_layer_sliding_window"),
                () if self.clears_spans else request.spans,
                options.get("mm_prefix_clamp_sliding_window", False),
            )
            scores = options.get("logits_soft_cap"), options.get("sinks"), options.get("alibi_slopes")
            wanted.append(dense_attention(q[new], request.k[n], request.v[n], visible, DIM**-0.5, *scores))
        return torch.cat(wanted)
