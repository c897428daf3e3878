"""Models with any backbone whose state has a constant size, such as Mamba2, in vLLM.

vLLM keeps a slot with the state of each request. A forward pass reads the states from the slots, solves the
new tokens with the layer, and writes the new states to the slots.

Shapes: T tokens in the flat batch, R requests, W tokens of the longest request, D width.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching
from vllm.model_executor.models.utils import maybe_prefix
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba_attn import (
    BaseMambaAttentionMetadata,
    BaseMambaAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from deqseq.backbone import State
from deqseq.backbones import fold_weight_norm
from deqseq.backbones.blocks import Stack
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.solution import Solution
from deqseq.vllm.batch import packing_of
from deqseq.vllm.configuration import compacts
from deqseq.vllm.metrics import IterationCounters
from deqseq.vllm.weights import checked


class MetadataBuilder(BaseMambaAttentionMetadataBuilder[BaseMambaAttentionMetadata]):
    metadata_cls = BaseMambaAttentionMetadata
    needs_causal_conv1d_metadata = False


class SlotBackend(AttentionBackend):
    """Tells a forward pass where the slots of its requests are. It computes no attention."""

    @staticmethod
    def get_name() -> str:
        return "DEQSEQ_SLOTS"

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class Slots(nn.Module, MambaBase):
    """The states of all requests. For vLLM, all blocks of the backbone are one layer.

    Args:
        example: a state of one sequence. Its tensors have the shapes and types of a slot.

    Attributes:
        kv_cache: for each tensor of a state, one tensor with all slots. vLLM sets this attribute.
    """

    kv_cache: tuple[Tensor, ...]
    mamba_type = MambaAttentionBackendEnum.MAMBA2

    def __init__(self, example: State, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.shapes = tuple(tuple(tensor.shape[1:]) for tensor in example.tensors()[1:])
        self.dtypes = tuple(tensor.dtype for tensor in example.tensors()[1:])
        self.name = prefix
        vllm_config.compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    def get_attn_backend(self) -> type[SlotBackend]:
        return SlotBackend

    def load(self, slots: Tensor, initial: State, seen: Tensor) -> State:
        """Read the states in ``slots`` (R,). New requests get their states from ``initial`` instead.

        ``seen`` (R,): number of tokens before each state; 0 for new requests.
        """
        stored = iter(self.kv_cache)

        def merge(values: Tensor) -> Tensor:
            old = (seen > 0).view(-1, *[1] * (values.dim() - 1))
            return torch.where(old, next(stored)[slots], values)

        return State(seen, tuple(tuple(map(merge, layer)) for layer in initial.layers))

    def store(self, slots: Tensor, state: State) -> None:
        for stored, values in zip(self.kv_cache, state.tensors()[1:], strict=True):
            stored[slots] = values


class ImplicitRecurrentForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """The language model. It contains an :class:`~deqseq.causal_lm.ImplicitForCausalLM`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.inner = ImplicitForCausalLM(vllm_config.model_config.hf_config)
        self.inner.train(False)
        backbone = self.inner.model.layer.backbone
        if vllm_config.model_config.hf_config.implicit:
            self.inner.model.layer.compact = compacts(vllm_config)
        self.counters = IterationCounters(vllm_config)
        self.slots = Slots(backbone.initial_state(1), vllm_config, maybe_prefix(prefix, "slots.0"))

    def get_mamba_state_copy_funcs(self, mamba_types: set[MambaAttentionBackendEnum]) -> dict[Any, Any]:
        """Tell vLLM's prefix cache to copy every tensor of a state as a whole."""
        copy = (get_temporal_copy_spec,) * len(self.slots.shapes)
        return dict.fromkeys(mamba_types, copy)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.inner.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The equilibria (T, D), f(0, x) of an injected model, or f(x) of an explicit one.

        Running requests, with one new token each, are solved separately from prompts, because every row of a
        batch is padded to the longest row.
        """
        x = self.inner.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory or compiles: there are no requests
            return x
        parts = metadata[self.slots.name]
        out = torch.zeros_like(x)
        solutions = []
        running, prompts = parts.num_decode_tokens, parts.num_prefill_tokens
        if running:
            starts = torch.arange(running + 1, device=x.device)
            slots = parts.state_indices_tensor_d[:running, 0]
            out[:running], solution = self._solve(x[:running], positions[:running], starts, slots)
            solutions.append(solution)
        if prompts:
            tokens = slice(running, running + prompts)
            starts, slots = parts.query_start_loc_p, parts.state_indices_tensor_p
            out[tokens], solution = self._solve(x[tokens], positions[tokens], starts, slots)
            solutions.append(solution)
        if found := [solution for solution in solutions if solution is not None]:
            self.counters.add(*found)
        return out

    def _solve(
        self, x: Tensor, positions: Tensor, starts: Tensor, slots: Tensor
    ) -> tuple[Tensor, Solution | None]:
        """The equilibria (T, D) of a flat batch, and the solution; ``None`` if the layer is explicit.

        Moves the states in ``slots`` (R,) past the tokens.
        """
        packing, slots = packing_of(starts, len(x)), slots.long()
        padded = packing.pack(x[None])
        mask = torch.arange(padded.shape[1], device=x.device) < packing.lengths[:, None]
        layer = self.inner.model.layer
        initial = layer.backbone.initial_state(len(slots), x.device, x.dtype)
        state = self.slots.load(slots, initial, positions[starts[:-1].long()])
        out = layer(padded, mask if padded.shape[1] > 1 else None, state=state)
        self.slots.store(slots, out.state)
        return packing.unpack(out.z)[0], out.solution

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.inner.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint and fold weight normalisation.

        Raises:
            ValueError: weights are missing, unknown or of another shape.
        """
        self.inner.load_state_dict(dict(checked(weights, self.inner.config)), strict=False)
        self.inner.tie_weights()
        if any(isinstance(part, Stack) for part in self.inner.modules()):
            fold_weight_norm(self.inner)
        return {name for name, _ in self.named_parameters()}
