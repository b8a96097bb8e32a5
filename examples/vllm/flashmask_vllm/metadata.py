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
from flashmask.inference import Forest, KvCache, SequenceMask
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
    has_alibi: bool


@dataclasses.dataclass
class Plans:
    """The plans of steps of one kind, made as they are needed and kept: captured graphs hold them."""

    max_batch: int
    max_rows: int
    made: dict[Sight, CachePlan] = dataclasses.field(default_factory=dict)

    def updated(
        self, step: FlashMaskMetadata, sight: Sight, mask: SequenceMask, layer: Any, cache: KvCache
    ) -> CachePlan:
        """The plan of layers that see alike, for a step. Those of one group have the same heads and tables."""
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
        self.made[sight].update(mask, cache, step.query_start_loc)
        return self.made[sight]


@dataclasses.dataclass
class SharedBlocks:
    """Plans of decoding steps whose requests read common blocks once. vLLM writes each step into the same memory, of
    which the forest was given these tensors."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    forest: Forest
    made: dict[Sight, CachePlan] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, step: FlashMaskMetadata, page_size: int) -> SharedBlocks:
        table, lengths, starts = step.tensors
        options = {"rows": step.num_actual_tokens, "batch_invariant": envs.VLLM_BATCH_INVARIANT}
        return cls(step.tensors, Forest.from_page_table(table, lengths, page_size, cu_seqlens_q=starts, **options))

    def updated(
        self, step: FlashMaskMetadata, sight: Sight, mask: SequenceMask, layer: Any, cache: KvCache
    ) -> CachePlan:
        """As Plans has it."""
        if sight not in self.made:
            heads_kv, head_dim, is_float8 = *cache.k.shape[2:], cache.k.dtype == torch.float8_e4m3fn
            self.made[sight] = self.forest.plan(
                layer.impl.num_heads, heads_kv, head_dim, cache.v.shape[3], float8=is_float8
            )
        self.forest.update_plan(self.made[sight], cache, mask, alibi=sight.has_alibi)
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
    plans: Plans | SharedBlocks
    planned: dict[Sight, tuple[SequenceMask, CachePlan]] = dataclasses.field(default_factory=dict)

    def planned_mask(self, layer: Any, cache: KvCache) -> tuple[SequenceMask, CachePlan]:
        """The mask of a layer, and its plan, updated for this step by the first layer that sees alike."""
        has_spans = self.mm_prefix_range is not None
        ends_at_window = layer.mm_prefix_clamp_sliding_window if has_spans else None
        sight = Sight(layer.impl.window, ends_at_window, layer.impl.has_alibi)
        if sight not in self.planned:
            mask = self._mask(sight)
            self.planned[sight] = mask, self.plans.updated(self, sight, mask, layer, cache)
        return self.planned[sight]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.block_table, self.seq_lens, self.query_start_loc

    def share(self, shared: SharedBlocks) -> None:
        """Has the step's requests read common blocks once, by what an earlier step in the same memory made."""
        self.block_table, self.seq_lens, self.query_start_loc = shared.tensors
        self.plans = shared

    def _mask(self, sight: Sight) -> SequenceMask:
        window, ends_at_window, _ = sight
        if ends_at_window is None or self.mm_prefix_range is None:
            return SequenceMask(window_size=(-1 if window is None else window - 1, 0))
        batch, device = len(self.seq_lens), self.seq_lens.device
        return span_mask(self.mm_prefix_range, batch, self.max_seq_len, window, ends_at_window, device)


def read_options(additional_config: Any) -> dict[str, bool]:
    """The options of the plug-in in vLLM's additional_config, {"flashmask": {..}}. Raises ValueError for others.

    shared_prefixes: steps that decode alone read blocks that requests share once, by a Forest. Default False.
    """
    options = {"shared_prefixes": False}
    given = additional_config.get("flashmask", {}) if isinstance(additional_config, dict) else {}
    for name, value in given.items():
        if name not in options or not isinstance(value, bool):
            raise ValueError(f"additional_config: flashmask has {name}={value!r}; it takes shared_prefixes, a bool")
    return options | given


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
        self.shares_prefixes = read_options(vllm_config.additional_config)["shared_prefixes"]
        self.shared: dict[tuple[Any, ...], SharedBlocks] = {}  # by their tensors

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
        layers = [x for x in self.different_layers if x.kv_cache.numel()]  # none yet where vLLM measures memory
        if layers and self.shares_prefixes and metadata.plans is self.decode and metadata.mm_prefix_range is None:
            self._share(metadata, layers[0].kv_cache.shape[2])
        for layer in layers:
            metadata.planned_mask(layer, layer.impl.cache(layer, layer.kv_cache, metadata))
        return metadata

    def _share(self, step: FlashMaskMetadata, page_size: int) -> None:
        key = (step.num_actual_tokens, *((x.data_ptr(), x.shape) for x in step.tensors))
        if key in self.shared:
            self.shared[key].forest.update()
        else:
            self.shared[key] = SharedBlocks.of(step, page_size)
        step.share(self.shared[key])

    @functools.cached_property
    def different_layers(self) -> list[Any]:
        """One layer of each way to see."""
        layers = [self.vllm_config.compilation_config.static_forward_context[name] for name in self.layer_names]
        return list({(x.impl.window, x.mm_prefix_clamp_sliding_window, x.impl.has_alibi): x for x in layers}.values())
