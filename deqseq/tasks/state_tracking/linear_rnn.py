"""Explicit baselines made for state tracking: gated DeltaProduct and RWKV-7.

Both are recurrences that are linear in their state. The state is one matrix per head. Every token multiplies
the state by a transition matrix. The transition matrix is diagonal in Mamba2, but not in these baselines.
This file computes the recurrences with loops over the tokens. The loops are fast enough for short training
sequences. For long sequences, flash-linear-attention has kernels.

Shapes: B batch, L tokens, D width, H heads, K = D / H width of a head, R reflections, N vocabulary.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from deqseq.causal_lm import ImplicitCausalLMOutput
from deqseq.checks import check_count


class LinearRNNConfig(PretrainedConfig):
    """The mixer and the sizes of a baseline.

    ``mixer`` is ``"deltaproduct"`` or ``"rwkv7"``. ``reflections`` is the number of reflections per token in
    DeltaProduct.
    """

    model_type = "state_tracking_linear_rnn"

    vocab_size: int = 60
    mixer: str = "deltaproduct"
    d_model: int = 256
    n_layer: int = 1
    headdim: int = 64
    reflections: int = 4


class LinearRNN(PreTrainedModel):
    """Maps token ids (B, L) to logits (B, L, N).

    Consists of embeddings, blocks with a mixer and an MLP, and an output layer.
    """

    config_class = LinearRNNConfig
    config: LinearRNNConfig

    def __init__(self, config: LinearRNNConfig) -> None:
        super().__init__(config)
        if config.d_model % config.headdim:
            raise ValueError(f"headdim must divide d_model = {config.d_model}, got {config.headdim}")
        check_count("reflections", config.reflections)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing, so that all modules keep the initialisation from their constructors."""

    def forward(self, input_ids: Tensor) -> ImplicitCausalLMOutput:
        hidden = self.embed_tokens(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return ImplicitCausalLMOutput(logits=self.lm_head(self.norm(hidden)))


class _Block(nn.Module):
    def __init__(self, config: LinearRNNConfig) -> None:
        super().__init__()
        d = config.d_model
        self.norm, self.mlp_norm = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.mixer = {"deltaproduct": DeltaProduct, "rwkv7": RWKV7}[config.mixer](config)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class DeltaProduct(nn.Module):
    """Gated DeltaProduct (Siems et al., 2025, arXiv 2502.10297).

    Every token applies R generalised reflections to the state. The eigenvalues of a reflection are between -1
    and 1.
    """

    def __init__(self, config: LinearRNNConfig) -> None:
        super().__init__()
        d, heads, self.reflections = config.d_model, config.d_model // config.headdim, config.reflections
        self.heads = heads
        self.query, self.gate = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, self.reflections * d, bias=False)
        self.value = nn.Linear(d, self.reflections * d, bias=False)
        self.beta = nn.Linear(d, self.reflections * heads)
        self.decay = nn.Linear(d, heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.step_bias = nn.Parameter(step + (-(-step).expm1()).log())  # so that softplus(step_bias) = step
        self.convolutions = nn.ModuleList(_Convolution(size) for size in (d, *2 * (self.reflections * d,)))
        self.norm = nn.RMSNorm(config.headdim, eps=1e-5)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length, r, h = x.shape[1], self.reflections, self.heads
        q, k, v = (
            convolve(project(x))
            for convolve, project in zip(self.convolutions, (self.query, self.key, self.value), strict=True)
        )
        q = F.normalize(q.unflatten(-1, (h, -1)), dim=-1)
        k = F.normalize(k.unflatten(-1, (r, h, -1)), dim=-1).flatten(1, 2)  # (B, L R, H, K)
        v = v.unflatten(-1, (r, h, -1)).flatten(1, 2)
        beta = 2 * self.beta(x).sigmoid().reshape(-1, length * r, h)
        g = -self.log_rate.exp() * F.softplus(self.decay(x).float() + self.step_bias)
        out = delta_product(q, k, v, g, beta, r)
        return self.out((self.norm(out) * F.silu(self.gate(x)).unflatten(-1, (h, -1))).flatten(-2))


class RWKV7(nn.Module):
    """The time mixing of RWKV-7 (Peng et al., 2025, arXiv 2503.14456).

    Unlike in RWKV-7, the values of the first layer are not mixed into the values of later layers.
    """

    def __init__(self, config: LinearRNNConfig) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.d_model // config.headdim
        # How much of the previous token is mixed into the inputs of r, w, k, v, a and g.
        self.mix = nn.Parameter(torch.rand(6, d))
        self.r, self.k, self.v, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w, self.a = _low_rank(d, 64, nn.Tanh()), _low_rank(d, 64, nn.Identity())
        self.g = nn.Sequential(nn.Linear(d, 128, bias=False), nn.Sigmoid(), nn.Linear(128, d, bias=False))
        self.k_k, self.k_a = nn.Parameter(torch.full((d,), 0.85)), nn.Parameter(torch.ones(d))
        self.r_k = nn.Parameter(torch.zeros(self.heads, config.headdim))
        self.norm = nn.GroupNorm(self.heads, d, eps=1e-5 * config.headdim)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        r, w, k, v, a, g = (x + (before - x) * mix for mix in self.mix)
        split = lambda y: y.unflatten(-1, (self.heads, -1))  # noqa: E731
        r, k, v, a = self.r(r), self.k(k), self.v(v), self.a(a).sigmoid()
        log_decay = -math.exp(-0.5) * self.w(w).float().sigmoid()
        kk = F.normalize(split(k * self.k_k), dim=-1)
        k = k * (1 + (a - 1) * self.k_a)
        r, k, v, a, log_decay = map(split, (r, k, v, a, log_decay))
        out = rwkv7(r, log_decay, k, v, -kk, kk * a)
        out = self.norm(out.flatten(0, 1).flatten(1)).unflatten(0, x.shape[:2])
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v
        return self.out((out + bonus.flatten(-2)) * self.g(g))


class _Convolution(nn.Conv1d):
    """A causal convolution over four tokens for each channel, followed by SiLU. Keeps the shape (B, L, D)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, 4, groups=size, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


def _low_rank(size: int, rank: int, between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, rank, bias=False), between, nn.Linear(rank, size))


def _in_float32(recurrence: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator that computes a recurrence in float32 and without autocast.

    Otherwise autocast would round the state to bfloat16.
    """

    @wraps(recurrence)
    def wrapped(*inputs: Any) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            return recurrence(*(y.float() if isinstance(y, Tensor) else y for y in inputs))

    return wrapped


@_in_float32
def delta_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, reflections: int) -> Tensor:
    """The recurrence of gated DeltaProduct; returns (B, L, H, K).

    S is the state of a head, a matrix (K, K). A prime means transposed. For every token, the recurrence first
    computes S <- exp(g) S. Then, for each of the token's R keys k, it computes S <- S + beta k (v - S' k)'.
    The output of the token is S' q / sqrt(K).

    Args:
        q: (B, L, H, K).
        k, v: (B, L R, H, K), the keys and the values. The keys have norm 1.
        g: (B, L, H), the logarithm of the decay.
        beta: (B, L R, H), between 0 and 2.
    """
    batch, length, heads, width = q.shape
    k, v, beta = (y.unflatten(1, (length, reflections)) for y in (k, v, beta))
    state = v.new_zeros(batch, heads, width, width)
    outputs = []
    for t in range(length):
        state = state * g[:, t, :, None, None].exp()
        for j in range(reflections):
            key = k[:, t, j]
            error = v[:, t, j] - torch.einsum("bhk,bhkv->bhv", key, state)
            state = state + torch.einsum("bhk,bhv->bhkv", key * beta[:, t, j, :, None], error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1) * width**-0.5


@_in_float32
def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The recurrence of RWKV-7. All arguments and the result have the shape (B, L, H, K).

    S is the state of a head, a matrix (K, K). A prime means transposed, and w is the logarithm of the decay.
    Every token computes S <- diag(exp(w)) S + b (a' S) + k v'. The output of the token is S' r.
    """
    batch, length, heads, width = r.shape
    state = v.new_zeros(batch, heads, width, width)
    outputs = []
    for t in range(length):
        seen = torch.einsum("bhk,bhkv->bhv", a[:, t], state)
        state = state * w[:, t, ..., None].exp() + torch.einsum("bhk,bhv->bhkv", b[:, t], seen)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state))
    return torch.stack(outputs, 1)
