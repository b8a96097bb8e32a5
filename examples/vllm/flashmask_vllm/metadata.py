# SPDX-License-Identifier: Apache-2.0
"""A step's metadata: vLLM's tensors as they are, and a plan for each mask that layers have, which they share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
import vllm.envs as envs
from flashmask import CachePlan
from flashmask.errors import UnsupportedError
from flashmask.inference import KvCache, SequenceMask
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from .image_spans import Spans, span_mask, step_spans


class Sight(NamedTuple):
    """How a layer sees, by which the masks of a step differ."""

    window: int | None
    spans_end_at_window: bool | None  # None: no spans


@dataclasses.dataclass
class Plans:
    """The plans of steps of one kind, made as they are needed and kept: captured graphs hold them."""

    max_batch: int
    max_rows: int
    made: dict[Sight, CachePlan] = dataclasses.field(default_factory=dict)

    def plan(self, sight: Sight, layer: Any, cache: KvCache) -> CachePlan:
        """The plan of layers that see alike. Those of one group have the same heads and tables."""
        if sight not in self.made:
            _, page_size, heads_kv, head_dim = cache.k.shape
            self.made[sight] = CachePlan(
                self.max_batch,
                self.max_rows,
                cache.page_table.shape[1] * page_size,
                layer.impl.num_heads,
                heads_kv,
                head_dim,
                cache.v.shape[3],
                batch_invariant=envs.VLLM_BATCH_INVARIANT,
                device=cache.k.device,
                float8=cache.k.dtype == torch.float8_e4m3fn,
            )
        return self.made[sight]


@dataclasses.dataclass
class FlashMaskMetadata(AttentionMetadata):
    """A step of the layers of one group. The tensors are vLLM's own."""

    num_actual_tokens: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    mm_prefix_range: Spans | None  # Gemma 4 clears it, by this name, for layers that see no spans
    plans: Plans
    planned: dict[Sight, tuple[SequenceMask, CachePlan]] = dataclasses.field(default_factory=dict)

    def planned_mask(self, layer: Any, cache: KvCache) -> tuple[SequenceMask, CachePlan]:
        """The mask of a layer, and its plan, updated for this step by the first layer that sees alike."""
        has_spans = self.mm_prefix_range is not None
        sight = Sight(layer.impl.window, layer.mm_prefix_clamp_sliding_window if has_spans else None)
        if sight not in self.planned:
            mask, plan = self._mask(sight), self.plans.plan(sight, layer, cache)
            plan.update(mask, cache, self.query_start_loc)
            self.planned[sight] = mask, plan
        return self.planned[sight]

    def _mask(self, sight: Sight) -> SequenceMask:
        window, ends_at_window = sight
        if ends_at_window is None or self.mm_prefix_range is None:
            return SequenceMask(window_size=(-1 if window is None else window - 1, 0))
        batch, device = len(self.seq_lens), self.seq_lens.device
        return span_mask(self.mm_prefix_range, batch, self.max_seq_len, window, ends_at_window, device)


class FlashMaskMetadataBuilder(AttentionMetadataBuilder[FlashMaskMetadata]):
    """Makes the metadata of each step, and updates the plans that its layers share. Waits for no device.

    Graphs hold the layers' calls and not the updates, for vLLM builds metadata before each replay. They are of steps
    whose requests have one number of rows, or for models with image spans one row, which needs no vectors.
    """

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        scheduler = vllm_config.scheduler_config
        batch = max(scheduler.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        self.decode_rows = max_decode_query_len(vllm_config)
        self.decode = Plans(batch, batch * self.decode_rows)
        # More rows than 64 a request and key head, which is what makes a plan one for prefill.
        self.mixed = Plans(batch, max(scheduler.max_num_batched_tokens, 64 * batch + 1))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        if vllm_config.model_config.is_mm_prefix_lm:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashMaskMetadata:
        """Raises UnsupportedError for a step that is not causal."""
        step = common_attn_metadata
        if step.causal is not True:
            raise UnsupportedError(f"causal is {step.causal}; the backend of flashmask takes True")
        metadata = FlashMaskMetadata(
            step.num_actual_tokens,
            step.max_seq_len,
            step.query_start_loc,
            step.seq_lens,
            step.block_table_tensor,
            step_spans(step),
            self.decode if step.max_query_len <= self.decode_rows else self.mixed,
        )
        for layer in self.different_layers:
            if layer.kv_cache.numel():  # none yet where vLLM measures memory
                metadata.planned_mask(layer, layer.impl.cache(layer, layer.kv_cache, metadata))
        return metadata

    @functools.cached_property
    def different_layers(self) -> list[Any]:
        """One layer of each way to see."""
        layers = [self.vllm_config.compilation_config.static_forward_context[name] for name in self.layer_names]
        return list({(x.impl.window, x.mm_prefix_clamp_sliding_window): x for x in layers}.values())
