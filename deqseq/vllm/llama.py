"""Implicit, injected and explicit Llama models with vLLM's paged attention.

Every evaluation of f writes the keys and values of its tokens to the cache, and overwrites those of the
previous evaluation. In the end the cache has the keys and values of the last evaluation, as without vLLM.

Shapes: T tokens in the flat batch, D width, H query heads, J key/value heads, P = D / H head dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from deqseq.vllm.attention import WITH_STARTS, Selector
from deqseq.vllm.batch import solve
from deqseq.vllm.configuration import backbone_of, compacts, solve_options
from deqseq.vllm.metrics import IterationCounters
from deqseq.vllm.weights import checked, folded


class Block(nn.Module):
    """One block, with the linear maps of vLLM, which split their weights over tensor-parallel devices."""

    def __init__(self, sizes: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        block = sizes.layers[0]
        width, hidden, eps = sizes.d_model, block.mlp.w1.out_features, block.norm.eps
        heads = (block.mixer.n_head, block.mixer.n_kv_head)
        self.norm = RMSNorm(width, eps=eps)
        self.qkv_proj = QKVParallelLinear(
            width, sizes.headdim, *heads, bias=False, prefix=f"{prefix}.qkv_proj"
        )
        self.split = [n * sizes.headdim for n in (self.qkv_proj.num_heads, *[self.qkv_proj.num_kv_heads] * 2)]
        self.attention = Attention(
            self.qkv_proj.num_heads, sizes.headdim, sizes.headdim**-0.5, self.qkv_proj.num_kv_heads,
            cache_config=vllm_config.cache_config, prefix=f"{prefix}.attention",
        )  # fmt: skip
        self.out_proj = RowParallelLinear(width, width, bias=False, prefix=f"{prefix}.out_proj")
        self.norm2 = RMSNorm(width, eps=eps)
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [hidden] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.activation = SiluAndMul()
        self.fc2 = RowParallelLinear(hidden, width, bias=False, prefix=f"{prefix}.fc2")

    def forward(
        self,
        stream: Tensor,
        added: Tensor | None,
        positions: Tensor,
        injection: Tensor | None,
        rotary: nn.Module,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream and the MLP's output. The next block adds the output to the stream."""
        if added is None:
            u = self.norm(stream)
        else:
            u, stream = self.norm(added, stream)
        qkv, _ = self.qkv_proj(u)
        if injection is not None:
            qkv = qkv + injection
        q, k, v = qkv.split(self.split, dim=-1)
        q, k = rotary(positions, q, k)
        mixed, _ = self.out_proj(self.attention(q, k, v))
        u, stream = self.norm2(mixed, stream)
        added, _ = self.fc2(self.activation(self.gate_up_proj(u)[0]))
        return stream, added


@support_torch_compile(dynamic_arg_dims={"z": 0, "positions": 0, "injection": 0, "x": 0})
class Evaluation(nn.Module):
    """One evaluation of f. vLLM compiles this module; the loop around it stays in Python."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        sizes: Any = backbone_of(vllm_config.model_config.hf_config)
        self.layers = nn.ModuleList(
            Block(sizes, vllm_config, f"{prefix}.layers.{i}") for i in range(len(sizes.layers))
        )
        self.norm_f = RMSNorm(sizes.d_model, eps=sizes.norm_f.eps)
        self.rotary = get_rope(
            sizes.headdim,
            max_position=vllm_config.model_config.max_model_len,
            rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        )
        self.gain = None if sizes.input_skip is None else nn.Parameter(torch.zeros(sizes.d_model))

    def forward(self, z: Tensor, positions: Tensor, injection: Tensor | None, x: Tensor | None) -> Tensor:
        """f(z) (T, D). With ``input_skip``, the stream starts at ``gain * z + x`` instead of z."""
        # Copy z, because RMSNorm may overwrite the stream, and the loop compares z with f(z).
        stream = z.clone() if self.gain is None or x is None else torch.addcmul(x, self.gain, z)
        added = None
        for layer in self.layers:
            stream, added = layer(stream, added, positions, injection, self.rotary)
        return self.norm_f(added, stream)[0]


class Injection(nn.Module):
    """The injection W RMSNorm(x) + b, (T, (H + 2 J) P), split over devices like queries, keys and values."""

    def __init__(self, sizes: Any, prefix: str) -> None:
        super().__init__()
        mixer = sizes.layers[0].mixer
        self.norm = RMSNorm(sizes.d_model, eps=sizes.injection.norm.eps)
        self.linear = QKVParallelLinear(
            sizes.d_model, sizes.headdim, mixer.n_head, mixer.n_kv_head, prefix=f"{prefix}.linear"
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))[0]


@dataclass(frozen=True)
class Step:
    """The map f of the requests of one step.

    Attributes:
        requests: (R,) int64 indices of the requests in the metadata of vLLM's step.
        positions, injection, x: (T, ...) arguments of :class:`Evaluation`.
        context: vLLM's forward context. It tells the attention layers where keys and values are stored.
    """

    evaluation: Evaluation
    selector: Selector
    requests: Tensor
    positions: Tensor
    injection: Tensor
    x: Tensor
    context: ForwardContext

    def __call__(self, z: Tensor) -> Tensor:
        with override_forward_context(self.context):
            return self.evaluation(z, self.positions, self.injection, self.x)

    def select(self, rows: Tensor, tokens: Tensor, starts: Tensor) -> Step:
        context = self.selector.select(self.context, self.requests[rows], tokens, starts)
        return replace(
            self,
            requests=torch.arange(len(rows), device=rows.device),
            positions=self.positions[tokens],
            injection=self.injection[tokens],
            x=self.x[tokens],
            context=context,
        )


class ImplicitLlamaForCausalLM(nn.Module):
    """The language model.

    Raises:
        ValueError: the attention backend does not say where each request begins.
    """

    mapper = WeightsMapper(
        orig_to_new_substr={
            ".mixer.out_proj.": ".out_proj.", ".mlp.fc2.": ".fc2.", ".input_skip.gain": ".gain",
        },
        orig_to_new_stacked={
            ".mixer.wq.": (".qkv_proj.", "q"), ".mixer.wk.": (".qkv_proj.", "k"),
            ".mixer.wv.": (".qkv_proj.", "v"), ".mlp.w1.": (".gate_up_proj.", 0),
            ".mlp.w3.": (".gate_up_proj.", 1),
        },
        orig_to_new_prefix={
            "model.layer.backbone.injection.": "injection.", "model.layer.backbone.": "evaluation.",
            "model.embed_tokens.": "embed_tokens.",
        },
    )  # fmt: skip

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.evaluation = Evaluation(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "evaluation"))
        self.options = solve_options(config) if config.implicit else None
        self.injection = None
        if config.form != "explicit":
            self.injection = Injection(backbone_of(config), maybe_prefix(prefix, "injection"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        layers = {part.layer_name: part for part in self.modules() if isinstance(part, Attention)}
        self.layer_name, attention = next(iter(layers.items()))
        self.selector = Selector(layers, vllm_config)
        self.compact = compacts(vllm_config)
        backend = attention.attn_backend.get_name()
        if config.implicit and backend not in WITH_STARTS:
            raise ValueError(
                f"implicit models need an attention backend that says where requests begin, one of "
                f"{', '.join(WITH_STARTS)}, got {backend}: set attention_backend"
            )
        devices = get_tp_group()  # all devices do the same iterations, so only the first one counts them
        self.counters = IterationCounters(vllm_config) if devices.is_first_rank else None
        self.group = devices.device_group if devices.world_size > 1 else None

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The equilibria (T, D), f(0, x) of an injected model, or f(x) of an explicit one."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.injection is None:
            return self.evaluation(x, positions, None, None)
        injection, context = self.injection(x), get_forward_context()
        if self.options is None or context.attn_metadata is None:  # no metadata: vLLM measures or compiles
            return self.evaluation(torch.zeros_like(x), positions, injection, x)
        starts = context.attn_metadata[self.layer_name].query_start_loc
        requests = (starts[1:] > starts[:-1]).nonzero()[:, 0]  # vLLM may list requests without tokens
        step = Step(self.evaluation, self.selector, requests, positions, injection, x, context)
        compact = self.compact and self.selector.can_select(context)
        z, solution = solve(step, x, starts, self.options, self.group, compact)
        if self.counters is not None:
            self.counters.add(solution)
        return z

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        weights = folded(checked(weights, self.config))
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.mapper)
