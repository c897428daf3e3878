"""Triton kernels for Mamba2's causal convolution with injection and SiLU, forward and backward.

Shapes: B sequences, L tokens, J columns of the projection [gate, x, b, c, dt], W convolved columns (x, b, c).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch
from deqseq.ops.mixer.naive import MixerSizes, MixerWeights


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _conv_input(proj, inj, tail, t, c, L, J: tl.constexpr, W: tl.constexpr, HAS_INJ: tl.constexpr,
                HAS_TAIL: tl.constexpr):  # fmt: skip
    """The convolution's input at token t and channels c.

    For t < 0, the input is read from ``tail``, which has the three inputs before the first token. Without a
    tail, the input for t < 0 is 0.
    """
    at = tl.zeros_like(c) + t
    inside = (c < W) & (at >= 0) & (at < L)
    v = tl.load(proj + t * J + c, inside, 0.0).to(tl.float32)
    if HAS_INJ:
        v += tl.load(inj + t * J + c, inside, 0.0).to(tl.float32)
    if HAS_TAIL:
        v += tl.load(tail + (t + 3) * W + c, (c < W) & (at < 0), 0.0).to(tl.float32)
    return v


@triton.jit
def _taps(weight, bias, c, real):
    """The four weights and the bias of channels c."""
    w0 = tl.load(weight + c * 4, real, 0.0).to(tl.float32)
    w1 = tl.load(weight + c * 4 + 1, real, 0.0).to(tl.float32)
    w2 = tl.load(weight + c * 4 + 2, real, 0.0).to(tl.float32)
    w3 = tl.load(weight + c * 4 + 3, real, 0.0).to(tl.float32)
    return w0, w1, w2, w3, tl.load(bias + c, real, 0.0).to(tl.float32)


@triton.jit
def _conv_kernel(proj, inj, tail, weight, bias, out, L, J: tl.constexpr, W: tl.constexpr,
                 FIRST: tl.constexpr, HAS_INJ: tl.constexpr, HAS_TAIL: tl.constexpr, T: tl.constexpr,
                 C: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """Convolve T tokens in order. Each input is read once and kept in registers for the next three tokens."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    first = tl.program_id(1) * T
    b = tl.program_id(2).to(tl.int64)
    proj += b * L * J + FIRST
    inj += b * L * J + FIRST
    tail += b * 3 * W
    out += b * L * W
    real = c < W
    w0, w1, w2, w3, shift = _taps(weight, bias, c, real)
    v0 = _conv_input(proj, inj, tail, first - 3, c, L, J, W, HAS_INJ, HAS_TAIL)
    v1 = _conv_input(proj, inj, tail, first - 2, c, L, J, W, HAS_INJ, HAS_TAIL)
    v2 = _conv_input(proj, inj, tail, first - 1, c, L, J, W, HAS_INJ, HAS_TAIL)
    for start in range(first, tl.minimum(first + T, L), UNROLL):
        for i in tl.static_range(UNROLL):
            t = start + i
            at = tl.zeros_like(c) + t
            v3 = _conv_input(proj, inj, tail, t, c, L, J, W, HAS_INJ, False)
            y = silu(shift + w0 * v0 + w1 * v1 + w2 * v2 + w3 * v3)
            tl.store(out + t * W + c, y.to(out.dtype.element_ty), real & (at < L))
            v0, v1, v2 = v1, v2, v3


@triton.jit
def _conv_backward_kernel(d_out, proj, inj, tail, weight, bias, d_proj, shares, L,
                          J: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, HAS_INJ: tl.constexpr,
                          HAS_TAIL: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
                          UNROLL: tl.constexpr):  # fmt: skip
    """Compute gradients for a block of T tokens: of their inputs, and of weight and bias.

    The gradients of weight and bias are sums over the block. The block's inputs also affect the outputs of
    the next three tokens. The loop therefore continues for three more tokens. They add to the gradients of
    the inputs, but not to the sums.
    """
    c = tl.program_id(0) * C + tl.arange(0, C)
    first = tl.program_id(1) * T
    b = tl.program_id(2).to(tl.int64)
    part = b * tl.num_programs(1) + tl.program_id(1)
    proj += b * L * J + FIRST
    inj += b * L * J + FIRST
    d_proj += b * L * J + FIRST
    tail += b * 3 * W
    d_out += b * L * W
    real = c < W
    w0, w1, w2, w3, shift = _taps(weight, bias, c, real)
    v0 = _conv_input(proj, inj, tail, first - 3, c, L, J, W, HAS_INJ, HAS_TAIL)
    v1 = _conv_input(proj, inj, tail, first - 2, c, L, J, W, HAS_INJ, HAS_TAIL)
    v2 = _conv_input(proj, inj, tail, first - 1, c, L, J, W, HAS_INJ, HAS_TAIL)
    g0 = tl.zeros((C,), tl.float32)
    g1 = tl.zeros((C,), tl.float32)
    g2 = tl.zeros((C,), tl.float32)
    s0 = tl.zeros((C,), tl.float32)
    s1 = tl.zeros((C,), tl.float32)
    s2 = tl.zeros((C,), tl.float32)
    s3 = tl.zeros((C,), tl.float32)
    s = tl.zeros((C,), tl.float32)
    for start in range(first, tl.minimum(first + T, L) + 3, UNROLL):
        for i in tl.static_range(UNROLL):
            t = start + i
            at = tl.zeros_like(c) + t
            v3 = _conv_input(proj, inj, tail, t, c, L, J, W, HAS_INJ, False)
            pre = shift + w0 * v0 + w1 * v1 + w2 * v2 + w3 * v3
            sig = tl.sigmoid(pre)
            g3 = tl.load(d_out + t * W + c, real & (at < L), 0.0).to(tl.float32)
            g3 = g3 * sig * (1.0 + pre * (1.0 - sig))
            d_in = w3 * g0 + w2 * g1 + w1 * g2 + w0 * g3
            mine = real & (at >= first + 3) & (at < first + T + 3) & (at < L + 3)
            tl.store(d_proj + (t - 3) * J + c, d_in.to(d_proj.dtype.element_ty), mine)
            own = tl.where(at < first + T, g3, 0.0)
            s += own
            s0 += own * v0
            s1 += own * v1
            s2 += own * v2
            s3 += own * v3
            v0, v1, v2 = v1, v2, v3
            g0, g1, g2 = g1, g2, g3
    shares += (part * W + c) * 5
    tl.store(shares, s0, real)
    tl.store(shares + 1, s1, real)
    tl.store(shares + 2, s2, real)
    tl.store(shares + 3, s3, real)
    tl.store(shares + 4, s, real)


def _grid(batch: int, length: int, width: int, unroll: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    tokens = min(64, triton.next_power_of_2(length))
    options = {"T": tokens, "C": 256, "UNROLL": min(unroll, tokens), "num_warps": 2}
    return (triton.cdiv(width, 256), triton.cdiv(length, tokens), batch), options


def convolve(
    proj: Tensor, inj: Tensor | None, w: MixerWeights, tail: Tensor | None, sizes: MixerSizes
) -> Tensor:
    """SiLU of the causal convolution (four taps) of the columns x, b, c of ``proj + inj``: (B, L, W)."""
    batch, length, columns = proj.shape
    out = proj.new_empty(batch, length, sizes.conv_width)
    grid, options = _grid(batch, length, sizes.conv_width, unroll=8)
    launch(
        _conv_kernel, grid, proj, proj if inj is None else inj, proj if tail is None else tail, w.conv,
        w.conv_bias, out, length, J=columns, W=sizes.conv_width, FIRST=sizes.inner, HAS_INJ=inj is not None,
        HAS_TAIL=tail is not None, **options,
    )  # fmt: skip
    return out


def convolve_backward(
    d_conv: Tensor, proj: Tensor, inj: Tensor | None, tail: Tensor | None, w: MixerWeights, d_proj: Tensor,
    sizes: MixerSizes,
) -> Tensor:  # fmt: skip
    """Returns the gradients (W, 5) of the four taps and the bias. The input's gradient goes to ``d_proj``."""
    batch, length, columns = proj.shape
    grid, options = _grid(batch, length, sizes.conv_width, unroll=4)
    shares = proj.new_empty(grid[1] * batch, sizes.conv_width, 5, dtype=torch.float32)
    launch(
        _conv_backward_kernel, grid, d_conv, proj, proj if inj is None else inj,
        proj if tail is None else tail, w.conv, w.conv_bias, d_proj, shares, length, J=columns,
        W=sizes.conv_width, FIRST=sizes.inner, HAS_INJ=inj is not None, HAS_TAIL=tail is not None, **options,
    )  # fmt: skip
    return shares.sum(0)
