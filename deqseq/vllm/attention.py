"""Runs vLLM's attention layers on some of the requests of a step.

Shapes: T tokens in the flat batch, R requests.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

WITH_STARTS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Attention backends whose metadata contain the start of each request."""


class Selector:
    """Makes vLLM's forward context for some of the requests of a step.

    Args:
        layers: the model's attention layers by name. All have the same backend and sizes.
    """

    def __init__(self, layers: Mapping[str, Attention], vllm_config: VllmConfig) -> None:
        self.layers = dict(layers)
        self.vllm_config = vllm_config
        self._builder: AttentionMetadataBuilder[Any] | None = None

    def can_select(self, context: ForwardContext) -> bool:
        """Whether requests may leave the step. CUDA graphs fix the number of tokens, so they forbid it."""
        return context.cudagraph_runtime_mode == CUDAGraphMode.NONE

    def select(
        self, context: ForwardContext, requests: Tensor, tokens: Tensor, starts: Tensor
    ) -> ForwardContext:
        """The forward context for the requests with the indices ``requests`` (r,) int64.

        Args:
            tokens: (t,) int64 indices of their tokens in the step's flat batch.
            starts: (r + 1,) int64 ``query_start_loc`` of the new flat batch.
        """
        name = next(iter(self.layers))
        attn_metadata: Any = context.attn_metadata
        whole = attn_metadata[name]
        query_start_loc = starts.to(whole.query_start_loc.dtype)
        slot_mapping: Any = context.slot_mapping
        slots = slot_mapping[name][tokens]
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc.cpu(),
            seq_lens=whole.seq_lens[requests],
            num_reqs=len(requests),
            num_actual_tokens=len(tokens),
            max_query_len=whole.max_query_len,
            max_seq_len=whole.max_seq_len,
            block_table_tensor=whole.block_table[requests],
            slot_mapping=slots,
            causal=whole.causal,
        )
        metadata = self._build(common)
        return replace(
            context,
            attn_metadata=dict.fromkeys(self.layers, metadata),
            slot_mapping=dict.fromkeys(self.layers, slots),
            batch_descriptor=None,
            is_padding=None,
        )

    def _build(self, common: CommonAttentionMetadata) -> Any:
        if self._builder is None:  # vLLM sets the size of the cache's blocks after it has built the model
            layer = next(iter(self.layers.values()))
            make = layer.attn_backend.get_builder_cls()
            spec = layer.get_kv_cache_spec(self.vllm_config)
            self._builder = make(spec, list(self.layers), self.vllm_config, common.seq_lens.device)
        return self._builder.build(0, common, fast_build=True)
