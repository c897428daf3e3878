"""The Mamba2 mixer in Triton kernels: what the plain form computes, reading the projection once.

Forward, between the two projections: one kernel adds the injection and convolves; one prepares step sizes;
one runs the recurrence, a program a head that carries the state in registers from chunk to chunk; one gates
and normalises. Backward stores the mixer's input and the recurrence's output only and recomputes the rest,
so that a step with a graph costs little memory. The recurrence's backward: states at the chunks' starts,
their gradients from the end, then what is inside a chunk, by head for x and the step sizes, and summed over a
group's heads in registers, in a fixed order, for b and c.

Shapes: B sequences, L tokens, E inner width, H heads, P head dim, N state dim, G groups, W = E + 2 G N
convolved channels, J = 2 E + 2 G N + H columns of the projection [gate, x, b, c, dt], Q tokens of a chunk.
Sums of log decays are kept in base 2, and start anew with every chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from deqseq.backbones.mamba2 import LayerTrace, MixerSizes, MixerWeights

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _conv_input(proj, inj, tail, t, c, L, J: tl.constexpr, W: tl.constexpr, HAS_INJ: tl.constexpr,
                HAS_TAIL: tl.constexpr):  # fmt: skip
    """The convolution's input at token t of a sequence and channels c; before the first token, the tail."""
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
    """T tokens, one after the other: every input is read once and kept for the next three."""
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
            y = _silu(shift + w0 * v0 + w1 * v1 + w2 * v2 + w3 * v3)
            tl.store(out + t * W + c, y.to(out.dtype.element_ty), real & (at < L))
            v0, v1, v2 = v1, v2, v3


@triton.jit
def _conv_backward_kernel(d_out, proj, inj, tail, weight, bias, d_proj, d_weight, d_bias, L,
                          J: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, HAS_INJ: tl.constexpr,
                          HAS_TAIL: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
                          UNROLL: tl.constexpr):  # fmt: skip
    """Gradients of the convolution's input, weight and bias, the latter summed over T tokens.

    Three tokens behind the block belong to the next one: they only pass back to this one's inputs.
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
    tl.store(d_bias + part * W + c, s, real)
    tl.store(d_weight + (part * W + c) * 4, s0, real)
    tl.store(d_weight + (part * W + c) * 4 + 1, s1, real)
    tl.store(d_weight + (part * W + c) * 4 + 2, s2, real)
    tl.store(d_weight + (part * W + c) * 4 + 3, s3, real)


@triton.jit
def _steps_kernel(proj, inj, dt_bias, decay, step, total, L, J: tl.constexpr, H: tl.constexpr,
                  HAS_INJ: tl.constexpr, Q: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Step sizes (B, H, L), 0 behind the end, and sums of log2 decays (B, H, L) from the chunk's start."""
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * Q + tl.arange(0, Q)[:, None]
    h = tl.arange(0, BH)[None, :]
    mask = (t < L) & (h < H)
    place = b * L * J + t * J + (J - H) + h
    raw = tl.load(proj + place, mask, 0.0).to(tl.float32)
    if HAS_INJ:
        raw += tl.load(inj + place, mask, 0.0).to(tl.float32)
    raw += tl.load(dt_bias + h, h < H, 0.0).to(tl.float32)
    dt = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    dt = tl.where(mask, dt, 0.0)
    rate = tl.load(decay + h, h < H, 0.0).to(tl.float32) * _LOG2_E
    to = b * H * L + h * L + t
    tl.store(step + to, dt, mask)
    tl.store(total + to, tl.cumsum(dt * rate, 0), mask)


@triton.jit
def _load(ptr, row, column, rows, columns, stride: tl.constexpr, EVEN: tl.constexpr):
    """A tile; zeros outside."""
    if EVEN:
        return tl.load(ptr + row * stride + column)
    return tl.load(ptr + row * stride + column, (row < rows) & (column < columns), 0.0)


@triton.jit
def _store(ptr, row, column, rows, columns, stride: tl.constexpr, v, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptr + row * stride + column, v.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + row * stride + column, v.to(ptr.dtype.element_ty), (row < rows) & (column < columns))


@triton.jit
def _decays(sums, q):
    """Decay from every token k of a chunk (columns) to every later one (rows); 0 to earlier ones."""
    return tl.exp2(tl.where(q[:, None] >= q[None, :], sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def _scan_kernel(conv, step, total, skip, before, y, L, W: tl.constexpr, E: tl.constexpr,
                 H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                 HAS_STATE: tl.constexpr, EVEN: tl.constexpr,
                 Q: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    g = h // (H // G)
    q = tl.arange(0, Q)
    row = q[:, None]
    n = tl.arange(0, BN)[None, :]
    p = tl.arange(0, BP)[None, :]
    through = tl.load(skip + h).to(tl.float32)
    state = tl.zeros((BN, BP), tl.float32)
    if HAS_STATE:  # (P, N) there
        n1 = tl.arange(0, BN)[:, None]
        state += tl.load(before + (b * H + h) * P * N + p * N + n1, (p < P) & (n1 < N), 0.0).to(tl.float32)
    conv += b * L * W
    y += b * L * E + h * P
    step += (b * H + h) * L
    total += (b * H + h) * L
    x_ptr = conv + h * P
    b_ptr = conv + E + g * N
    c_ptr = b_ptr + G * N
    for start in range(0, L, Q):
        rest = L - start
        x = _load(x_ptr, row, p, rest, P, W, EVEN)
        bb = _load(b_ptr, row, n, rest, N, W, EVEN)
        c = _load(c_ptr, row, n, rest, N, W, EVEN)
        dt = tl.load(step + start + q, q < rest, 0.0)
        sums = tl.load(total + start + tl.minimum(q, rest - 1))
        end = tl.load(total + start + tl.minimum(Q, rest) - 1)
        scores = tl.dot(c, tl.trans(bb), input_precision=PRECISION)
        scores *= _decays(sums, q) * dt[None, :]
        out = tl.dot(c, state.to(c.dtype), input_precision=PRECISION) * tl.exp2(sums)[:, None]
        out = tl.dot(scores.to(x.dtype), x, out, input_precision=PRECISION)
        x32 = x.to(tl.float32)
        out += through * x32
        _store(y, row, p, rest, P, E, out, EVEN)
        left = (x32 * (tl.exp2(end - sums) * dt)[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(bb), left, state * tl.exp2(end), input_precision=PRECISION)
        x_ptr += Q * W
        b_ptr += Q * W
        c_ptr += Q * W
        y += Q * E


@triton.jit
def _gated_norm_kernel(y, proj, inj, weight, out, J: tl.constexpr, E: tl.constexpr, eps,
                       GROUP: tl.constexpr, HAS_INJ: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    e = tl.program_id(1) * GROUP + i
    mask = i < GROUP
    gate = tl.load(proj + row * J + e, mask, 0.0).to(tl.float32)
    if HAS_INJ:
        gate += tl.load(inj + row * J + e, mask, 0.0).to(tl.float32)
    v = tl.load(y + row * E + e, mask, 0.0).to(tl.float32) * _silu(gate)
    scale = tl.rsqrt(tl.sum(v * v, 0) / GROUP + eps)
    w = tl.load(weight + e, mask, 0.0).to(tl.float32)
    tl.store(out + row * E + e, (v * scale * w).to(out.dtype.element_ty), mask)


@triton.jit
def _gated_norm_backward_kernel(grad, y, proj, inj, weight, out, d_y, d_proj, d_weight, rows,
                                J: tl.constexpr, E: tl.constexpr, eps, GROUP: tl.constexpr,
                                HAS_INJ: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    i = tl.arange(0, BLOCK)
    e = tl.program_id(1) * GROUP + i
    mask = i < GROUP
    w = tl.load(weight + e, mask, 0.0).to(tl.float32)
    d_w = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        gate = tl.load(proj + row * J + e, mask, 0.0).to(tl.float32)
        if HAS_INJ:
            gate += tl.load(inj + row * J + e, mask, 0.0).to(tl.float32)
        v = tl.load(y + row * E + e, mask, 0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        gated = v * gate * s
        scale = tl.rsqrt(tl.sum(gated * gated, 0) / GROUP + eps)
        unit = gated * scale
        d_out = tl.load(grad + row * E + e, mask, 0.0).to(tl.float32)
        d_w += d_out * unit
        d_unit = d_out * w
        d_gated = (d_unit - unit * (tl.sum(d_unit * unit, 0) / GROUP)) * scale
        tl.store(out + row * E + e, (unit * w).to(out.dtype.element_ty), mask)
        tl.store(d_y + row * E + e, (d_gated * gate * s).to(d_y.dtype.element_ty), mask)
        d_gate = d_gated * v * s * (1.0 + gate * (1.0 - s))
        tl.store(d_proj + row * J + e, d_gate.to(d_proj.dtype.element_ty), mask)
    tl.store(d_weight + tl.program_id(0).to(tl.int64) * E + e, d_w, mask)


@triton.jit
def _states_kernel(conv, step, total, before, states, L, W: tl.constexpr, E: tl.constexpr,
                   H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                   HAS_STATE: tl.constexpr, EVEN: tl.constexpr,
                   Q: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The state (N, P) at the start of every chunk."""
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    g = h // (H // G)
    q = tl.arange(0, Q)
    row = q[:, None]
    n = tl.arange(0, BN)[None, :]
    n1 = tl.arange(0, BN)[:, None]
    p = tl.arange(0, BP)[None, :]
    state = tl.zeros((BN, BP), tl.float32)
    if HAS_STATE:
        state += tl.load(before + (b * H + h) * P * N + p * N + n1, (p < P) & (n1 < N), 0.0).to(tl.float32)
    conv += b * L * W
    step += (b * H + h) * L
    total += (b * H + h) * L
    x_ptr = conv + h * P
    b_ptr = conv + E + g * N
    states += (b * tl.cdiv(L, Q) * H + h) * N * P
    for start in range(0, L, Q):
        rest = L - start
        _store(states, n1, p, N, P, P, state, EVEN)
        x = _load(x_ptr, row, p, rest, P, W, EVEN)
        bb = _load(b_ptr, row, n, rest, N, W, EVEN)
        dt = tl.load(step + start + q, q < rest, 0.0)
        sums = tl.load(total + start + tl.minimum(q, rest - 1))
        end = tl.load(total + start + tl.minimum(Q, rest) - 1)
        left = (x.to(tl.float32) * (tl.exp2(end - sums) * dt)[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(bb), left, state * tl.exp2(end), input_precision=PRECISION)
        x_ptr += Q * W
        b_ptr += Q * W
        states += H * N * P


@triton.jit
def _state_gradients_kernel(conv, total, d_y, d_states, L, W: tl.constexpr, E: tl.constexpr,
                            H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                            EVEN: tl.constexpr, Q: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
                            PRECISION: tl.constexpr):  # fmt: skip
    """The gradient (N, P) of the state at the end of every chunk, from the last chunk on."""
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    g = h // (H // G)
    q = tl.arange(0, Q)
    row = q[:, None]
    n = tl.arange(0, BN)[None, :]
    n1 = tl.arange(0, BN)[:, None]
    p = tl.arange(0, BP)[None, :]
    d_state = tl.zeros((BN, BP), tl.float32)
    chunks = tl.cdiv(L, Q)
    last = (chunks - 1) * Q
    total += (b * H + h) * L
    c_ptr = conv + (b * L + last) * W + E + (G + g) * N
    d_y += (b * L + last) * E + h * P
    d_states += ((b * chunks + chunks - 1) * H + h) * N * P
    for back in range(0, chunks):
        start = last - back * Q
        rest = L - start
        _store(d_states, n1, p, N, P, P, d_state, EVEN)
        c = _load(c_ptr, row, n, rest, N, W, EVEN)
        out = _load(d_y, row, p, rest, P, E, EVEN)
        sums = tl.load(total + start + tl.minimum(q, rest - 1))
        end = tl.load(total + start + tl.minimum(Q, rest) - 1)
        out = (out.to(tl.float32) * tl.exp2(sums)[:, None]).to(c.dtype)
        d_state = tl.dot(tl.trans(c), out, d_state * tl.exp2(end), input_precision=PRECISION)
        c_ptr -= Q * W
        d_y -= Q * E
        d_states -= H * N * P


@triton.jit
def _x_gradients_kernel(conv, step, total, decay, skip, states, d_states, d_y, d_conv, d_proj,
                        d_decay, d_skip, d_bias, L, J: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
                        H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                        EVEN: tl.constexpr, Q: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """Of one head in one chunk: gradients of x and of the step sizes' inputs, and its share of those of
    decay, skip and the step sizes' bias."""
    h = tl.program_id(0)
    i = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    g = h // (H // G)
    chunks = tl.cdiv(L, Q)
    start = i * Q
    rest = L - start
    q = tl.arange(0, Q)
    row = q[:, None]
    n = tl.arange(0, BN)[None, :]
    n1 = tl.arange(0, BN)[:, None]
    p = tl.arange(0, BP)[None, :]
    conv += (b * L + start) * W
    step += (b * H + h) * L + start
    total += (b * H + h) * L + start
    slot = ((b * chunks + i) * H + h) * N * P
    rate = tl.load(decay + h).to(tl.float32)
    through = tl.load(skip + h).to(tl.float32)
    dt = tl.load(step + q, q < rest, 0.0)
    sums = tl.load(total + tl.minimum(q, rest - 1))
    end = tl.load(total + tl.minimum(Q, rest) - 1)
    bb = _load(conv + E + g * N, row, n, rest, N, W, EVEN)
    d_state = _load(d_states + slot, n1, p, N, P, P, EVEN)
    into = tl.dot(bb, d_state, input_precision=PRECISION)  # (Q, P)
    c = _load(conv + E + (G + g) * N, row, n, rest, N, W, EVEN)
    products = tl.dot(c, tl.trans(bb), input_precision=PRECISION)
    products *= _decays(sums, q)
    x = _load(conv + h * P, row, p, rest, P, W, EVEN)
    out = _load(d_y + (b * L + start) * E + h * P, row, p, rest, P, E, EVEN)
    x32 = x.to(tl.float32)
    out32 = out.to(tl.float32)
    left = tl.exp2(end - sums)
    d_x = into * (left * dt)[:, None] + through * out32
    scores = (products * dt[None, :]).to(x.dtype)
    d_x = tl.dot(tl.trans(scores), out, d_x, input_precision=PRECISION)
    _store(d_conv + (b * L + start) * W + h * P, row, p, rest, P, W, d_x, EVEN)
    pull = tl.dot(out, tl.trans(x), input_precision=PRECISION) * products  # over dt
    by_column = tl.sum(pull, 0)
    by_row = tl.sum(pull * dt[None, :], 1)
    moved = left * tl.sum(x32 * into, 1)
    state = _load(states + slot, n1, p, N, P, P, EVEN)
    kept = tl.dot(c, state, input_precision=PRECISION)
    carried = tl.sum(out32 * kept, 1) * tl.exp2(sums)
    # Step sizes: each scales its own input, and every decay from its token on.
    d_total = by_row + carried - (by_column + moved) * dt
    d_end = tl.exp2(end) * tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0)
    d_end += tl.sum(moved * dt, 0)
    d_a = tl.sum(d_total, 0) - tl.cumsum(d_total, 0) + d_total + d_end
    d_raw = (by_column + moved + d_a * rate) * (1.0 - tl.exp(-dt))
    tl.store(d_proj + (b * L + start + q) * J + (J - H) + h, d_raw.to(d_proj.dtype.element_ty), q < rest)
    share = (b * chunks + i) * H + h
    tl.store(d_decay + share, tl.sum(d_a * dt, 0))
    tl.store(d_skip + share, tl.sum(tl.sum(out32 * x32, 1), 0))
    tl.store(d_bias + share, tl.sum(tl.where(q < rest, d_raw, 0.0), 0))


@triton.jit
def _bc_gradients_kernel(conv, step, total, states, d_states, d_y, d_conv, L,
                         W: tl.constexpr, E: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
                         N: tl.constexpr, P: tl.constexpr,
                         EVEN: tl.constexpr, Q: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
                         PRECISION: tl.constexpr):  # fmt: skip
    """Gradients of b and c in one chunk, summed over the heads of a group."""
    g = tl.program_id(0)
    i = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    chunks = tl.cdiv(L, Q)
    start = i * Q
    rest = L - start
    q = tl.arange(0, Q)
    row = q[:, None]
    n = tl.arange(0, BN)[None, :]
    n1 = tl.arange(0, BN)[:, None]
    p = tl.arange(0, BP)[None, :]
    first = g * (H // G)
    conv += (b * L + start) * W
    d_conv += (b * L + start) * W
    x_ptr = conv + first * P
    y_ptr = d_y + (b * L + start) * E + first * P
    step += (b * H + first) * L + start
    total += (b * H + first) * L + start
    states += ((b * chunks + i) * H + first) * N * P
    d_states += ((b * chunks + i) * H + first) * N * P
    d_products = tl.zeros((Q, Q), tl.float32)
    d_b = tl.zeros((Q, BN), tl.float32)
    d_c = tl.zeros((Q, BN), tl.float32)
    for _ in range(H // G):
        x = _load(x_ptr, row, p, rest, P, W, EVEN)
        out = _load(y_ptr, row, p, rest, P, E, EVEN)
        dt = tl.load(step + q, q < rest, 0.0)
        sums = tl.load(total + tl.minimum(q, rest - 1))
        end = tl.load(total + tl.minimum(Q, rest) - 1)
        state = _load(states, n1, p, N, P, P, EVEN)
        d_state = _load(d_states, n1, p, N, P, P, EVEN)
        pull = tl.dot(out, tl.trans(x), input_precision=PRECISION)
        d_products += pull * _decays(sums, q) * dt[None, :]
        out = (out.to(tl.float32) * tl.exp2(sums)[:, None]).to(out.dtype)
        d_c = tl.dot(out, tl.trans(state), d_c, input_precision=PRECISION)
        left = (x.to(tl.float32) * (tl.exp2(end - sums) * dt)[:, None]).to(x.dtype)
        d_b = tl.dot(left, tl.trans(d_state), d_b, input_precision=PRECISION)
        x_ptr += P
        y_ptr += P
        step += L
        total += L
        states += N * P
        d_states += N * P
    bb = _load(conv + E + g * N, row, n, rest, N, W, EVEN)
    c = _load(conv + E + (G + g) * N, row, n, rest, N, W, EVEN)
    summed = d_products.to(c.dtype)
    d_c = tl.dot(summed, bb, d_c, input_precision=PRECISION)
    d_b = tl.dot(tl.trans(summed), c, d_b, input_precision=PRECISION)
    _store(d_conv + E + g * N, row, n, rest, N, W, d_b, EVEN)
    _store(d_conv + E + (G + g) * N, row, n, rest, N, W, d_c, EVEN)


def _recurrence_options(sizes: MixerSizes, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """What every kernel of the recurrence is compiled for."""
    # Tokens of a chunk: as many as fit a multiprocessor, no more than there are.
    small = sizes.d_state * sizes.headdim * dtype.itemsize <= 128 * 64 * 2
    chunk = min(64 if small else 16, max(16, triton.next_power_of_2(length)))
    block_n, block_p = (max(16, triton.next_power_of_2(n)) for n in (sizes.d_state, sizes.headdim))
    return {
        "W": sizes.conv_width,
        "E": sizes.inner,
        "H": sizes.heads,
        "G": sizes.n_groups,
        "N": sizes.d_state,
        "P": sizes.headdim,
        "EVEN": length % chunk == 0 and block_n == sizes.d_state and block_p == sizes.headdim,
        "Q": chunk,
        "BN": block_n,
        "BP": block_p,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


_CONV_TOKENS = 64


def _conv_grid(batch: int, length: int, width: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    tokens = min(_CONV_TOKENS, triton.next_power_of_2(length))
    options = {"T": tokens, "C": 256, "UNROLL": min(8, tokens), "num_warps": 2}
    return (triton.cdiv(width, 256), triton.cdiv(length, tokens), batch), options


def convolve(
    proj: Tensor, inj: Tensor | None, weight: Tensor, bias: Tensor, tail: Tensor | None, sizes: MixerSizes
) -> Tensor:
    """SiLU of the causal convolution (B, L, W), with ``weight`` (W, 4), of proj + inj's columns x, b, c."""
    batch, length, columns = proj.shape
    out = proj.new_empty(batch, length, sizes.conv_width)
    grid, options = _conv_grid(batch, length, sizes.conv_width)
    _conv_kernel[grid](
        proj, proj if inj is None else inj, proj if tail is None else tail, weight, bias, out, length,
        J=columns, W=sizes.conv_width, FIRST=sizes.inner, HAS_INJ=inj is not None, HAS_TAIL=tail is not None,
        **options,
    )  # fmt: skip
    return out


def steps(
    proj: Tensor, inj: Tensor | None, dt_bias: Tensor, decay: Tensor, sizes: MixerSizes, chunk: int
) -> tuple[Tensor, Tensor]:
    """Step sizes (B, H, L) and sums of log2 decays (B, H, L) from their chunk's start, float32."""
    batch, length, columns = proj.shape
    step = torch.empty(batch, sizes.heads, length, device=proj.device, dtype=torch.float32)
    total = torch.empty_like(step)
    _steps_kernel[(triton.cdiv(length, chunk), batch)](
        proj, proj if inj is None else inj, dt_bias, decay, step, total, length, J=columns, H=sizes.heads,
        HAS_INJ=inj is not None, Q=chunk, BH=triton.next_power_of_2(sizes.heads),
    )  # fmt: skip
    return step, total


def scan(
    convolved: Tensor,
    step: Tensor,
    total: Tensor,
    skip: Tensor,
    state: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """The recurrence and its skip, y (B, L, E)."""
    batch, length, _ = convolved.shape
    y = convolved.new_empty(batch, length, options["E"])
    _scan_kernel[(options["H"], batch)](
        convolved, step, total, skip, convolved if state is None else state, y, length,
        HAS_STATE=state is not None, **options, num_warps=4, num_stages=2,
    )  # fmt: skip
    return y


def gated_norm(y: Tensor, proj: Tensor, inj: Tensor | None, weight: Tensor, sizes: MixerSizes) -> Tensor:
    """RMSNorm(y * silu(gate)) (B, L, E), the gate being the first E columns of proj + inj."""
    out = torch.empty_like(y)
    rows, columns = proj.shape[0] * proj.shape[1], proj.shape[2]
    group = sizes.inner // sizes.norm_groups
    _gated_norm_kernel[(rows, sizes.norm_groups)](
        y, proj, proj if inj is None else inj, weight, out, J=columns, E=sizes.inner, eps=sizes.norm_eps,
        GROUP=group, HAS_INJ=inj is not None, BLOCK=triton.next_power_of_2(group),
    )  # fmt: skip
    return out


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, inj: Tensor | None, tail: Tensor | None, state: Tensor | None, sizes: MixerSizes,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The mixer's output, then the projection, its convolution and the step sizes, for the trace."""
        w = MixerWeights(*weights)
        options = _recurrence_options(sizes, u.shape[1], u.dtype)
        proj = u @ w.in_proj.t()
        convolved = convolve(proj, inj, w.conv, w.conv_bias, tail, sizes)
        step, total = steps(proj, inj, w.dt_bias, w.decay, sizes, options["Q"])
        y = scan(convolved, step, total, w.skip, state, options)
        ctx.save_for_backward(u, inj, tail, state, y, *weights)
        ctx.sizes = sizes
        ctx.options = options
        ctx.mark_non_differentiable(proj, convolved, step)
        ctx.set_materialize_grads(False)  # zeros for what the trace holds
        return gated_norm(y, proj, inj, w.norm, sizes) @ w.out_proj.t(), proj, convolved, step

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *of_trace: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (5 + len(MixerWeights._fields))
        u, inj, tail, state, y, *weights = ctx.saved_tensors
        w = MixerWeights(*weights)
        sizes: MixerSizes = ctx.sizes
        grad = grad.contiguous()
        proj = u @ w.in_proj.t()
        d_proj = torch.empty_like(proj)
        d_normed = grad @ w.out_proj
        normed, d_y, d_norm = _gated_norm_backward(d_normed, y, proj, inj, w.norm, d_proj, sizes)
        d_out_proj = _outer(grad, normed)
        del normed, d_normed
        convolved = convolve(proj, inj, w.conv, w.conv_bias, tail, sizes)
        step, total = steps(proj, inj, w.dt_bias, w.decay, sizes, ctx.options["Q"])
        d_conv, d_decay, d_skip, d_bias = _scan_backward(
            convolved, step, total, state, d_y, d_proj, w, ctx.options
        )
        del convolved, d_y
        d_weight, d_conv_bias = _conv_backward(d_conv, proj, inj, tail, w, d_proj, sizes)
        d_u = d_proj @ w.in_proj if ctx.needs_input_grad[0] else None
        grads = (_outer(d_proj, u), d_weight, d_conv_bias, d_decay, d_bias, d_skip, d_norm, d_out_proj)
        return (
            d_u, d_proj if inj is not None else None, None, None, None,
            *(g.to(weight.dtype) for g, weight in zip(grads, weights, strict=True)),
        )  # fmt: skip


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """sum over tokens of left (B, L, I) right (B, L, J)^T, (I, J)."""
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


def _gated_norm_backward(
    grad: Tensor,
    y: Tensor,
    proj: Tensor,
    inj: Tensor | None,
    weight: Tensor,
    d_proj: Tensor,
    sizes: MixerSizes,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised output again, the gradients of y and weight; the gate's goes into ``d_proj``."""
    out, d_y = torch.empty_like(y), torch.empty_like(y)
    rows, columns = proj.shape[0] * proj.shape[1], proj.shape[2]
    group = sizes.inner // sizes.norm_groups
    share = max(8, triton.cdiv(rows, 4096))
    parts = triton.cdiv(rows, share)
    d_weight = torch.empty(parts, sizes.inner, device=y.device, dtype=torch.float32)
    _gated_norm_backward_kernel[(parts, sizes.norm_groups)](
        grad, y, proj, proj if inj is None else inj, weight, out, d_y, d_proj, d_weight, rows,
        J=columns, E=sizes.inner, eps=sizes.norm_eps, GROUP=group, HAS_INJ=inj is not None,
        BLOCK=triton.next_power_of_2(group), ROWS=share,
    )  # fmt: skip
    return out, d_y, d_weight.sum(0)


def _scan_backward(
    convolved: Tensor, step: Tensor, total: Tensor, state: Tensor | None, d_y: Tensor, d_proj: Tensor,
    w: MixerWeights, options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of ``convolved``, decay, skip and dt_bias; the step sizes' go into ``d_proj``."""
    batch, length, _ = convolved.shape
    heads, chunks = options["H"], triton.cdiv(length, options["Q"])
    shape = (batch, chunks, heads, options["N"], options["P"])
    states, d_states = convolved.new_empty(shape), convolved.new_empty(shape)
    _states_kernel[(heads, batch)](
        convolved, step, total, convolved if state is None else state, states, length,
        HAS_STATE=state is not None, **options,
    )  # fmt: skip
    _state_gradients_kernel[(heads, batch)](convolved, total, d_y, d_states, length, **options)
    d_conv = torch.empty_like(convolved)
    shares = torch.empty(3, batch * chunks, heads, device=d_y.device, dtype=torch.float32)
    _x_gradients_kernel[(heads, chunks, batch)](
        convolved, step, total, w.decay, w.skip, states, d_states, d_y, d_conv, d_proj, *shares, length,
        J=d_proj.shape[2], **options, num_warps=4, num_stages=1,
    )  # fmt: skip
    _bc_gradients_kernel[(options["G"], chunks, batch)](
        convolved, step, total, states, d_states, d_y, d_conv, length, **options, num_warps=8, num_stages=3
    )
    d_decay, d_skip, d_bias = shares.sum(1)
    return d_conv, d_decay, d_skip, d_bias


def _conv_backward(
    d_conv: Tensor, proj: Tensor, inj: Tensor | None, tail: Tensor | None, w: MixerWeights, d_proj: Tensor,
    sizes: MixerSizes,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of weight and bias; the input's goes into ``d_proj``."""
    batch, length, columns = proj.shape
    grid, options = _conv_grid(batch, length, sizes.conv_width)
    d_weight = torch.empty(grid[1] * batch, sizes.conv_width, 4, device=proj.device, dtype=torch.float32)
    d_bias = torch.empty(grid[1] * batch, sizes.conv_width, device=proj.device, dtype=torch.float32)
    _conv_backward_kernel[grid](
        d_conv, proj, proj if inj is None else inj, proj if tail is None else tail, w.conv, w.conv_bias,
        d_proj, d_weight, d_bias, length, J=columns, W=sizes.conv_width, FIRST=sizes.inner,
        HAS_INJ=inj is not None, HAS_TAIL=tail is not None, **options,
    )  # fmt: skip
    return d_weight.sum(0), d_bias.sum(0)


def mix(
    u: Tensor, inj: Tensor | None, weights: MixerWeights, state: tuple[Tensor, ...] | None, sizes: MixerSizes
) -> tuple[Tensor, LayerTrace | None]:
    """The mixer of u (B, L, D) with at most four taps: (B, L, D), and what moves ``state`` on."""
    tail, ssm = (None, None) if state is None else state
    missing = 4 - weights.conv.shape[1]
    if missing:
        weights = weights._replace(conv=F.pad(weights.conv, (missing, 0)))
        tail = None if tail is None else F.pad(tail, (0, 0, missing, 0))
    out, proj, convolved, step = _Mix.apply(u.contiguous(), inj, tail, ssm, sizes, *weights)
    if state is None:
        return out, None
    shared = sizes.n_groups * sizes.d_state
    x, b, _ = convolved.split([sizes.inner, shared, shared], -1)
    inputs = slice(sizes.inner, sizes.inner + sizes.conv_width)
    trace = LayerTrace(
        tuple(part[..., inputs] for part in (proj, inj) if part is not None),
        x.unflatten(-1, (sizes.heads, sizes.headdim)),
        b.unflatten(-1, (sizes.n_groups, sizes.d_state)),
        step.transpose(1, 2),
        weights.decay,
    )
    return out, trace
