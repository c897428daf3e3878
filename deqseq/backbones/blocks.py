"""Pieces that backbones share: the injection, gated MLPs, argument checks.

Modules here are evaluated with effective weights read beforehand, once a forward pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from deqseq import kernels
from deqseq.checks import check_count

RMS_EPS = 1e-5


def add_norm(
    stream: Tensor, added: Tensor | None, norm: nn.RMSNorm, last: bool = False
) -> tuple[Tensor, Tensor]:
    """stream + added (B, W, D), in the stream's type, and its norm.

    The norm comes in autocast's type, as it enters linear maps; the ``last`` one, f(z), in the stream's.
    After that one nothing looks at the stream, and what stands in its place may be ``None``.
    """
    device = stream.device.type
    cast = torch.is_autocast_enabled(device) and not last and stream.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if cast else stream.dtype
    if not torch.compiler.is_compiling() and kernels.implementation(stream) == "triton":
        from deqseq.backbones.kernels.norm import add_norm as fused

        return fused(stream, added, norm, dtype, last)
    if added is not None:
        stream = stream + added
    return stream, norm(stream).to(dtype)


def one_token(stream: Tensor, weight: Tensor, state: tuple[Tensor, ...] | None) -> bool:
    """Whether the kernels for one token a sequence compute a block: decoding, by Triton.

    Args:
        stream: (B, W, D).
        weight: of a projection, in the type that it is applied in.
        state: the layer's.
    """
    return (
        state is not None
        and stream.shape[1] == 1
        and stream.shape[0] <= 64
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and kernels.implementation(stream) == "triton"
        and kernels.implementation(weight, products=True) == "triton"
    )


class Injection(nn.Module):
    """W RMSNorm(x) + b: how the layer's input x (B, L, D) enters every block, (B, L, width)."""

    def __init__(self, d_model: int, width: int, norm_eps: float = RMS_EPS) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=norm_eps)
        self.linear = nn.Linear(d_model, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x))
        return out


class InputSkip(nn.Module):
    """gain * z + x: where the blocks start if x (B, W, D) enters their stream too; the gain starts at 0."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(d_model))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, self.gain.to(x.dtype), z)


class MLPWeights(NamedTuple):
    """Effective weights of a gated MLP: ``into`` (2 * hidden, D), ``out`` (D, hidden)."""

    into: Tensor
    out: Tensor


class ValueGateMLP(nn.Module):
    """fc2(value * silu(gate)) with (value, gate) = fc1(x); hidden width a multiple of 128, no biases."""

    def __init__(self, d_model: int, d_inner: int) -> None:
        super().__init__()
        hidden = -(-d_inner // 128) * 128
        self.fc1 = nn.Linear(d_model, 2 * hidden, bias=False)
        self.fc2 = nn.Linear(hidden, d_model, bias=False)

    def weights(self) -> MLPWeights:
        return MLPWeights(projection(self.fc1), projection(self.fc2))

    def forward(self, x: Tensor, weights: MLPWeights) -> Tensor:
        value, gate = F.linear(x, weights.into).chunk(2, dim=-1)
        return F.linear(value * F.silu(gate), weights.out)


class SwiGLU(nn.Module):
    """fc2(silu(w1 x) * w3 x) with hidden width int(2 d_inner / 3), no biases (Shazeer, 2020)."""

    def __init__(self, d_model: int, d_inner: int) -> None:
        super().__init__()
        hidden = 2 * d_inner // 3
        self.w1 = nn.Linear(d_model, hidden, bias=False)
        self.w3 = nn.Linear(d_model, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, d_model, bias=False)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return projection(self.w1), projection(self.w3), projection(self.fc2)

    def forward(self, x: Tensor, weights: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        w1, w3, fc2 = weights
        return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), fc2)


def plain_weight(module: nn.Linear | nn.Conv1d) -> Tensor:
    """The effective weight of a map that backbones apply themselves, once a forward pass.

    Raises:
        ValueError: something else stands in the module's place, an adapter for example, whose own forward
            would never be called.
    """
    if type_before_parametrizations(module) not in (nn.Linear, nn.Conv1d):
        raise ValueError(
            "backbones read weights instead of calling their modules, so a "
            f"{type(module).__name__} in place of a linear map would be left out: merge adapters first"
        )
    return module.weight


def projection(linear: nn.Linear) -> Tensor:
    """The effective weight of a linear map, in the type that autocast would apply it in.

    Cast once a forward pass instead of at every evaluation.
    """
    weight = plain_weight(linear)
    device = weight.device.type
    if not torch.is_autocast_enabled(device) or weight.dtype == torch.float64:  # which autocast leaves
        return weight
    return weight.to(torch.get_autocast_dtype(device))


def check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` for a size that is not a whole number of at least 1."""
    for name, value in sizes.items():
        check_count(name, value)


def check_norm_eps(norm_eps: float) -> None:
    """Raise ``ValueError`` unless ``norm_eps`` is finite and positive: a token may be all zeros."""
    if not (math.isfinite(norm_eps) and norm_eps > 0):
        raise ValueError(f"norm_eps must be finite and positive, got {norm_eps}")
