"""Blocks at one token a sequence in few Triton kernels, for decoding: at such sizes a kernel's start and its
first loads take most of its time, so each does all that it can.

Shapes: B sequences, D inputs and N outputs of a projection; of Mamba2: E inner width, H heads, P head dim,
N state dim, G groups, W = E + 2 G N convolved channels, K taps, J = E + W + H columns [gate, x, b, c, dt]; of
Llama: H query heads, J key/value heads, P head dim, S slots of the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deqseq.backbones.kernels.convolution import silu
from deqseq.backbones.kernels.norm import summed
from deqseq.backbones.mamba2 import LayerTrace, MixerSizes, MixerWeights
from deqseq.kernels import launch

if TYPE_CHECKING:
    from deqseq.backbones.mamba2 import Mamba2Block

Norm = tuple[Tensor, float | None]
"""Weight and eps."""

_FEW = 132
"""Programs that a GPU should have at least: multiprocessors of an H100."""


@triton.jit
def _row_kernel(x, added, norm, weight, times, plus, total, out, plus_stride, eps, D: tl.constexpr,
                N: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_TIMES: tl.constexpr,
                HAS_PLUS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """BN outputs of a sequence. Weights are asked for before what they multiply is computed."""
    b = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    mine = tl.where(tl.program_id(0) == 0, D, 0)  # the first program stores the sum
    squares = 0.0
    y = tl.zeros((BN,), tl.float32)
    z = tl.zeros((BN,), tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)
        place = n[:, None] * D + k[None, :]
        mask = (n < N)[:, None] & (k < D)[None, :]
        w = tl.load(weight + place, mask, 0.0)
        if HAS_TIMES:
            t = tl.load(times + place, mask, 0.0)
        v = summed(x, added, b * D + k, k < D, HAS_ADDED)
        if HAS_ADDED:
            tl.store(total + b * D + k, v, k < mine)
        v = v.to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(v * v, 0)
            v *= tl.load(norm + k, k < D, 0.0).to(tl.float32)
        y += tl.sum(w.to(tl.float32) * v[None, :], 1)
        if HAS_TIMES:
            z += tl.sum(t.to(tl.float32) * v[None, :], 1)
    if HAS_NORM:
        scale = tl.rsqrt(squares / D + eps)
        y *= scale
        z *= scale
    if HAS_TIMES:
        y = silu(y) * z
    if HAS_PLUS:
        y += tl.load(plus + b * plus_stride + n, n < N, 0.0).to(tl.float32)
    tl.store(out + b * N + n, y.to(out.dtype.element_ty), n < N)


@triton.jit
def _rows_kernel(x, added, norm, weight, times, plus, total, out, B, plus_stride, eps, D: tl.constexpr,
                 N: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_TIMES: tl.constexpr,
                 HAS_PLUS: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """BN outputs of all sequences. The norm's scale of a row is known at the end, and applied there, unless
    what is multiplied has to be SCALED: unscaled, it could leave float16's range."""
    r = tl.arange(0, ROWS)[:, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    mine = tl.where(tl.program_id(0) == 0, B, 0)  # the first program stores the sum
    squares = tl.zeros((ROWS, BK), tl.float32)
    if SCALED:
        for start in range(0, D, BK):
            k = start + tl.arange(0, BK)[None, :]
            v = summed(x, added, r * D + k, (r < B) & (k < D), HAS_ADDED).to(tl.float32)
            squares += v * v
        scale = tl.rsqrt(tl.sum(squares, 1) / D + eps)[:, None]
    y = tl.zeros((ROWS, BN), tl.float32)
    z = tl.zeros((ROWS, BN), tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)[None, :]
        v = summed(x, added, r * D + k, (r < B) & (k < D), HAS_ADDED)
        if HAS_ADDED:
            tl.store(total + r * D + k, v, (r < mine) & (k < D))
        if HAS_NORM:
            v = v.to(tl.float32)
            if SCALED:
                v *= scale
            else:
                squares += v * v
            v *= tl.load(norm + k, k < D, 0.0).to(tl.float32)
        u = v.to(weight.dtype.element_ty)
        k = start + tl.arange(0, BK)[:, None]
        w = tl.load(weight + n * D + k, (n < N) & (k < D), 0.0)
        y = tl.dot(u, w, y, input_precision=PRECISION)
        if HAS_TIMES:
            t = tl.load(times + n * D + k, (n < N) & (k < D), 0.0)
            z = tl.dot(u, t, z, input_precision=PRECISION)
    if HAS_NORM and not SCALED:
        scale = tl.rsqrt(tl.sum(squares, 1) / D + eps)[:, None]
        y *= scale
        z *= scale
    if HAS_TIMES:
        y = silu(y) * z
    mask = (r < B) & (n < N)
    if HAS_PLUS:
        y += tl.load(plus + r * plus_stride + n, mask, 0.0).to(tl.float32)
    tl.store(out + r * N + n, y.to(out.dtype.element_ty), mask)


def project(
    x: Tensor, weight: Tensor, norm: Norm | None = None, added: Tensor | None = None,
    plus: Tensor | None = None, times: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A linear map of few rows with what is around it.

    Args:
        x: (B, 1, D), B at most 64.
        weight: (N, D).
        norm: RMSNorm of what is mapped.
        added: (B, 1, D) added to x before that, in x's type.
        plus: (B, 1, N) added to what comes out.
        times: (N, D) weight of a second map, by which SiLU of the first is multiplied.

    Returns:
        x + added, and (B, 1, N) in the weight's type.
    """
    batch, (width, columns) = x.shape[0], (x.shape[2], weight.shape[0])
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    if plus is not None and plus.stride(2) != 1:
        plus = plus.contiguous()
    total = x if added is None else torch.empty_like(x)
    out = weight.new_empty(batch, 1, columns)
    scale, eps = (weight, 0.0) if norm is None else norm
    args = [
        x, x if added is None else added, scale, weight.contiguous(),
        weight if times is None else times.contiguous(), x if plus is None else plus, total, out,
    ]  # fmt: skip
    # A single sequence has no stride, and another one at every token would look like another kernel.
    stride = 0 if plus is None or batch == 1 else plus.stride(0)
    constants: dict[str, Any] = {
        "D": width, "N": columns, "HAS_ADDED": added is not None, "HAS_NORM": norm is not None,
        "HAS_TIMES": times is not None, "HAS_PLUS": plus is not None,
    }  # fmt: skip
    if batch == 1:
        block_k = min(2048, triton.next_power_of_2(width))
        block_n = next((n for n in (16, 8) if triton.cdiv(columns, n) >= _FEW), 4)
        elements = block_n * block_k * (1 if times is None else 2)
        launch(
            _row_kernel, (triton.cdiv(columns, block_n), batch), *args, stride, eps, **constants, BN=block_n,
            BK=block_k, num_warps=4 if elements <= 2**14 else 8,
        )  # fmt: skip
        return total, out
    rows = max(16, triton.next_power_of_2(batch))
    block_n = 32 if triton.cdiv(columns, 32) >= _FEW else 16
    launch(
        _rows_kernel, (triton.cdiv(columns, block_n),), *args, batch, stride, eps, **constants,
        SCALED=norm is not None and weight.dtype == torch.float16, ROWS=rows, BN=block_n,
        BK=128 if rows < 64 else 64, PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        num_stages=4,
    )  # fmt: skip
    return total, out


@triton.jit
def _convolved(row, tail, weight, bias, c, real, W: tl.constexpr, K: tl.constexpr):
    """SiLU of the convolution of channels c of the last token, in the row's type."""
    v = tl.load(row + c, real, 0.0).to(tl.float32) * tl.load(weight + c * K + K - 1, real, 0.0).to(tl.float32)
    for k in tl.static_range(K - 1):
        before = tl.load(tail + k * W + c, real, 0.0).to(tl.float32)
        v += before * tl.load(weight + c * K + k, real, 0.0).to(tl.float32)
    return silu(v + tl.load(bias + c, real, 0.0).to(tl.float32)).to(row.dtype.element_ty)


@triton.jit
def _mixer_kernel(row, tail, state, weight, bias, decay, dt_bias, skip, y, x_out, b_out, step_out,
                  H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
                  BP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    E: tl.constexpr = H * P
    W: tl.constexpr = E + 2 * G * N
    h = tl.program_id(0)
    s = tl.program_id(1).to(tl.int64)
    g = h // (H // G)
    p = tl.arange(0, BP)
    n = tl.arange(0, BN)
    row += s * (E + W + H)
    tail += s * (K - 1) * W
    place = (s * H + h) * P * N + p[:, None] * N + n[None, :]
    before = tl.load(state + place, (p < P)[:, None] & (n < N)[None, :], 0.0)
    c = _convolved(row + E, tail, weight, bias, E + (G + g) * N + n, n < N, W, K).to(tl.float32)
    b = _convolved(row + E, tail, weight, bias, E + g * N + n, n < N, W, K)
    x = _convolved(row + E, tail, weight, bias, h * P + p, p < P, W, K)
    if h % (H // G) == 0:
        tl.store(b_out + (s * G + g) * N + n, b, n < N)
    tl.store(x_out + s * E + h * P + p, x, p < P)
    raw = tl.load(row + E + W + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
    dt = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    tl.store(step_out + s * H + h, dt)
    left = tl.exp(dt * tl.load(decay + h).to(tl.float32))
    through = dt * tl.sum(tl.where(n < N, b.to(tl.float32) * c, 0.0), 0) + tl.load(skip + h).to(tl.float32)
    v = left * tl.sum(before.to(tl.float32) * c[None, :], 1) + through * x.to(tl.float32)
    gate = tl.load(row + h * P + p, p < P, 0.0).to(tl.float32)
    tl.store(y + s * E + h * P + p, (v * silu(gate)).to(y.dtype.element_ty), p < P)


def mixer_step(
    row: Tensor, w: MixerWeights, state: tuple[Tensor, ...], sizes: MixerSizes
) -> tuple[Tensor, LayerTrace]:
    """y * silu(gate) (B, 1, E) of the projection (B, 1, J), and what moves the state on.

    Every head convolves its group's b and c for itself.
    """
    batch = row.shape[0]
    tail, ssm = (t.contiguous() for t in state)
    y = row.new_empty(batch, 1, sizes.inner)
    x = row.new_empty(batch, 1, sizes.heads, sizes.headdim)
    b = row.new_empty(batch, 1, sizes.n_groups, sizes.d_state)
    step = torch.empty(batch, 1, sizes.heads, device=row.device, dtype=torch.float32)
    block_p, block_n = triton.next_power_of_2(sizes.headdim), triton.next_power_of_2(sizes.d_state)
    launch(
        _mixer_kernel, (sizes.heads, batch), row, tail, ssm, w.conv.contiguous(), w.conv_bias, w.decay,
        w.dt_bias, w.skip, y, x, b, step, H=sizes.heads, P=sizes.headdim, N=sizes.d_state, G=sizes.n_groups,
        K=w.conv.shape[1], BP=block_p, BN=block_n, num_warps=min(16, max(4, block_p * block_n // 2048)),
    )  # fmt: skip
    inputs = row[..., sizes.inner : sizes.inner + sizes.conv_width]
    return y, LayerTrace((inputs,), x, b, step, w.decay)


def mamba2_block(
    block: Mamba2Block, stream: Tensor, added: Tensor | None, weights: tuple[MixerWeights, Any],
    injection: Tensor | None, state: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, LayerTrace]:  # fmt: skip
    """The block at one token a sequence, with one group of the gated norm."""
    mixer, mlp = weights
    sizes = block.mixer.sizes
    stream, row = project(stream, mixer.in_proj, (block.norm.weight, block.norm.eps), added, plus=injection)
    y, trace = mixer_step(row, mixer, state, sizes)
    added = project(y, mixer.out_proj, (mixer.norm, sizes.norm_eps))[1]
    if block.norm2 is not None:
        value, gate = mlp.into.chunk(2)
        stream, y = project(stream, gate, (block.norm2.weight, block.norm2.eps), added, times=value)
        added = project(y, mlp.out)[1]
    return stream, added, trace
