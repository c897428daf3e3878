"""Triton kernels for decoding. They compute a Mamba2 or Llama block for one token per sequence.

With so few tokens, a kernel spends most of its time on starting and on its first loads. So a block uses few
kernels, and each kernel does several operations.

Shapes:

- projection: B sequences, D inputs, N outputs.
- Mamba2: E inner width, H heads, P head dim, N state dim, G groups, W = E + 2 G N convolved channels, K taps,
  J = E + W + H columns [gate, x, b, c, dt].
- Llama: H query heads, J key/value heads, P head dim, S slots of the state.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch
from deqseq.ops.add_norm.triton import sum_and_norm, summed
from deqseq.ops.mixer.naive import LayerTrace, MixerSizes, MixerWeights
from deqseq.ops.mixer.triton_convolution import silu
from deqseq.ops.one_token import AttentionWeights, Norm, SwiGLUWeights, ValueGateWeights

_FEW = 132
"""A projection tries to start at least this many programs: one for each of an H100's 132 multiprocessors."""


@triton.jit
def _row_kernel(x, added, norm, weight, times, plus, total, out, eps, D: tl.constexpr, N: tl.constexpr,
                HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_TIMES: tl.constexpr,
                HAS_PLUS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Compute BN outputs of one sequence. Each step of the loop issues its loads before its reductions."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if HAS_PLUS:
        more = tl.load(plus + n, n < N, 0.0).to(tl.float32)
    mine = tl.where(tl.program_id(0) == 0, D, 0)  # only the first program stores x + added
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
        if HAS_NORM:
            g = tl.load(norm + k, k < D, 0.0).to(tl.float32)
        v = summed(x, added, k, k < D, HAS_ADDED)
        if HAS_ADDED:
            tl.store(total + k, v, k < mine)
        v = v.to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(v * v, 0)
            v *= g
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
        y += more
    tl.store(out + n, y.to(out.dtype.element_ty), n < N)


@triton.jit
def _rows_kernel(x, weight, times, plus, out, B, plus_stride, D: tl.constexpr, N: tl.constexpr,
                 HAS_TIMES: tl.constexpr, HAS_PLUS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Compute BN outputs of all sequences."""
    r = tl.arange(0, ROWS)[:, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)[None, :]
    mask = (r < B) & (n < N)
    if HAS_PLUS:
        more = tl.load(plus + r * plus_stride + n, mask, 0.0).to(tl.float32)
    y = tl.zeros((ROWS, BN), tl.float32)
    z = tl.zeros((ROWS, BN), tl.float32)
    for start in range(0, D, BK):
        k = start + tl.arange(0, BK)[None, :]
        u = tl.load(x + r * D + k, (r < B) & (k < D), 0.0).to(weight.dtype.element_ty)
        k = start + tl.arange(0, BK)[:, None]
        w = tl.load(weight + n * D + k, (n < N) & (k < D), 0.0)
        y = tl.dot(u, w, y, input_precision=PRECISION)
        if HAS_TIMES:
            t = tl.load(times + n * D + k, (n < N) & (k < D), 0.0)
            z = tl.dot(u, t, z, input_precision=PRECISION)
    if HAS_TIMES:
        y = silu(y) * z
    if HAS_PLUS:
        y += more
    tl.store(out + r * N + n, y.to(out.dtype.element_ty), mask)


def project(
    x: Tensor, weight: Tensor, norm: Norm | None = None, added: Tensor | None = None,
    plus: Tensor | None = None, times: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A linear map of RMSNorm(x + added), with the operations before and after the map.

    For one sequence, this is a single kernel. For more sequences, the norm is a kernel of its own.

    Args:
        x: (B, 1, D), with B at most 64.
        weight: (N, D).
        norm: weight and eps of the RMSNorm; ``None``: no norm.
        added: (B, 1, D) added to ``x`` before the norm; needs ``norm``.
        plus: (B, 1, N) added to the output.
        times: (N, D) weight of a second linear map of the same input. The output is then
            silu(first) * second, where first and second are the results of the two maps.

    Returns:
        x + added (B, 1, D), and the output (B, 1, N) in the weight's type.
    """
    assert norm is not None or added is None
    x, weight = x.contiguous(), weight.contiguous()
    added = None if added is None else added.contiguous()
    times = None if times is None else times.contiguous()
    if plus is not None and plus.stride(2) != 1:
        plus = plus.contiguous()
    if len(x) == 1:
        return _project_one(x, weight, norm, added, plus, times)
    if norm is None:
        return x, _project_all(x, weight, plus, times)
    total, normed = sum_and_norm(x, added, *norm, weight.dtype, last=False)
    return total, _project_all(normed, weight, plus, times)


def _project_one(
    x: Tensor,
    weight: Tensor,
    norm: Norm | None,
    added: Tensor | None,
    plus: Tensor | None,
    times: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """:func:`project` for a single sequence. All programs read the whole input."""
    columns, width = weight.shape
    total = x if added is None else torch.empty_like(x)
    out = weight.new_empty(1, 1, columns)
    scale, eps = (weight, 0.0) if norm is None else norm
    block_k = min(2048, triton.next_power_of_2(width))
    block_n = next((n for n in (16, 8) if triton.cdiv(columns, n) >= _FEW), 4)
    elements = block_n * block_k * (1 if times is None else 2)
    launch(
        _row_kernel, (triton.cdiv(columns, block_n),), x, x if added is None else added, scale, weight,
        weight if times is None else times, x if plus is None else plus, total, out, eps, D=width, N=columns,
        HAS_ADDED=added is not None, HAS_NORM=norm is not None, HAS_TIMES=times is not None,
        HAS_PLUS=plus is not None, BN=block_n, BK=block_k, num_warps=4 if elements <= 2**14 else 8,
    )  # fmt: skip
    return total, out


def _project_all(x: Tensor, weight: Tensor, plus: Tensor | None, times: Tensor | None) -> Tensor:
    """:func:`project` for several sequences, without the norm.

    Each program computes outputs of all sequences.
    """
    batch, (columns, width) = len(x), weight.shape
    out = weight.new_empty(batch, 1, columns)
    rows = max(16, triton.next_power_of_2(batch))
    block_n = 32 if triton.cdiv(columns, 32) >= _FEW else 16
    launch(
        _rows_kernel, (triton.cdiv(columns, block_n),), x, weight, weight if times is None else times,
        x if plus is None else plus, out, batch, 0 if plus is None else plus.stride(0), D=width, N=columns,
        HAS_TIMES=times is not None, HAS_PLUS=plus is not None, ROWS=rows, BN=block_n,
        BK=256 // weight.element_size(), PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        num_warps=2 if rows == 16 else 4, num_stages=4 if times is None else 3,
    )  # fmt: skip
    return out


@triton.jit
def _convolved(row, tail, weight, bias, c, real, W: tl.constexpr, K: tl.constexpr):
    """Convolve channels c at the current token and apply SiLU. The result has the row's type."""
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
    raw = tl.load(row + E + W + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
    rate = tl.load(decay + h).to(tl.float32)
    through = tl.load(skip + h).to(tl.float32)
    gate = tl.load(row + h * P + p, p < P, 0.0).to(tl.float32)
    x = _convolved(row + E, tail, weight, bias, h * P + p, p < P, W, K)
    b = _convolved(row + E, tail, weight, bias, E + g * N + n, n < N, W, K)
    c = _convolved(row + E, tail, weight, bias, E + (G + g) * N + n, n < N, W, K).to(tl.float32)
    dt = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
    through += dt * tl.sum(tl.where(n < N, b.to(tl.float32) * c, 0.0), 0)
    v = tl.exp(dt * rate) * tl.sum(before.to(tl.float32) * c[None, :], 1) + through * x.to(tl.float32)
    tl.store(y + s * E + h * P + p, (v * silu(gate)).to(y.dtype.element_ty), p < P)
    tl.store(x_out + s * E + h * P + p, x, p < P)
    tl.store(step_out + s * H + h, dt)
    if h % (H // G) == 0:
        tl.store(b_out + (s * G + g) * N + n, b, n < N)


def mixer_step(
    row: Tensor, w: MixerWeights, state: tuple[Tensor, ...], sizes: MixerSizes
) -> tuple[Tensor, LayerTrace]:
    """Compute y * silu(gate) (B, 1, E) from the projection (B, 1, J), where y is the recurrence's output.

    Also returns the trace. The heads of a group share b and c, but each head's program computes them itself.
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
    return y, LayerTrace((inputs,), x, b, step, w.decay.expand(batch, -1))


def mamba2_block(
    stream: Tensor, added: Tensor | None, mixer: MixerWeights, mlp: ValueGateWeights | None,
    injection: Tensor | None, state: tuple[Tensor, ...], sizes: MixerSizes, norm: Norm, norm2: Norm | None,
) -> tuple[Tensor, Tensor, LayerTrace]:  # fmt: skip
    """Compute a Mamba2 block whose gated norm has one group.

    Returns the stream, the output of the block's last part (MLP or mixer), and the trace. The stream does not
    contain this output yet; the next block adds it.
    """
    stream, row = project(stream, mixer.in_proj, norm, added, plus=injection)
    y, trace = mixer_step(row, mixer, state, sizes)
    added = project(y, mixer.out_proj, (mixer.norm, sizes.norm_eps))[1]
    if mlp is not None:
        value, gate = mlp.into.chunk(2)
        stream, y = project(stream, gate, norm2, added, times=value)
        added = project(y, mlp.out)[1]
    return stream, added, trace


@triton.jit
def _rotated(x, cos, sin, p, P: tl.constexpr):
    """Apply the rotary position embedding to one head. The result has the type of ``x``."""
    first = p < P // 2
    v = tl.load(x + p, p < P, 0.0).to(tl.float32)
    other = tl.load(x + tl.where(first, p + P // 2, p - P // 2), p < P, 0.0).to(tl.float32)
    return (v * cos + tl.where(first, -other, other) * sin).to(x.dtype.element_ty)


@triton.jit
def _attention_kernel(row, cos, sin, keys, values, seen, y, k_out, v_out, S, scale, H: tl.constexpr,
                      J: tl.constexpr, P: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """Attention of one head. A loop reads the state's slots in blocks of BS slots.

    Each of the BS places in a block keeps its own running softmax. After the loop, the kernel combines the BS
    softmaxes and adds the current token.
    """
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    j = h // (H // J)
    p = tl.arange(0, BP)
    row += b * (H + 2 * J) * P
    keys += (b * J + j) * S * P
    values += (b * J + j) * S * P
    filled = tl.minimum(tl.load(seen + b), S).to(tl.int32)
    c = tl.load(cos + b * P + p, p < P, 0.0).to(tl.float32)
    s = tl.load(sin + b * P + p, p < P, 0.0).to(tl.float32)
    q = _rotated(row + h * P, c, s, p, P).to(tl.float32) * scale
    k = _rotated(row + (H + j) * P, c, s, p, P)
    v = tl.load(row + (H + J + j) * P + p, p < P, 0.0)
    top = tl.full((BS,), -1e30, tl.float32)  # not -inf: masked scores would give exp(-inf + inf) = NaN
    weight = tl.zeros((BS,), tl.float32)
    total = tl.zeros((BS, BP), tl.float32)
    for start in tl.range(0, filled, BS, num_stages=3):
        t = start + tl.arange(0, BS)
        place = t[:, None] * P + p[None, :]
        mask = (t < filled)[:, None] & (p < P)[None, :]
        k_t = tl.load(keys + place, mask, 0.0).to(tl.float32)
        v_t = tl.load(values + place, mask, 0.0).to(tl.float32)
        score = tl.where(t < filled, tl.sum(k_t * q[None, :], 1), float("-inf"))
        higher = tl.maximum(top, score)
        kept = tl.exp(top - higher)
        share = tl.exp(score - higher)
        weight = weight * kept + share
        total = total * kept[:, None] + v_t * share[:, None]
        top = higher
    own = tl.sum(q * k.to(tl.float32), 0)
    highest = tl.maximum(tl.max(top, 0), own)
    kept = tl.exp(top - highest)
    share = tl.exp(own - highest)
    out = tl.sum(total * kept[:, None], 0) + share * v.to(tl.float32)
    out /= tl.sum(weight * kept, 0) + share
    tl.store(y + (b * H + h) * P + p, out.to(y.dtype.element_ty), p < P)
    if h % (H // J) == 0:
        tl.store(k_out + (b * J + j) * P + p, k, p < P)
        tl.store(v_out + (b * J + j) * P + p, v, p < P)


def attention_step(
    row: Tensor, rotary: tuple[Tensor, Tensor], state: tuple[Tensor, ...], seen: Tensor, heads: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The projected token (B, 1, (H + 2 J) P) attends to the first ``seen`` (B,) slots and to itself.

    Returns y (B, 1, H P), and the token's keys and values (B, J, 1, P).
    """
    batch, keys, values = row.shape[0], *(t.contiguous() for t in state)
    _, kv_heads, slots, width = keys.shape
    y = row.new_empty(batch, 1, heads * width)
    k, v = (row.new_empty(batch, kv_heads, 1, width) for _ in range(2))
    block_p = triton.next_power_of_2(width)
    cos, sin = (t.contiguous() for t in rotary)
    launch(
        _attention_kernel, (heads, batch), row, cos, sin, keys, values, seen, y, k, v, slots, width**-0.5,
        H=heads, J=kv_heads, P=width, BS=min(128, max(16, 8192 // block_p)), BP=block_p, num_warps=8,
    )  # fmt: skip
    return y, (k, v)


def llama_block(
    stream: Tensor, added: Tensor | None, attention: AttentionWeights, mlp: SwiGLUWeights,
    injection: Tensor | None, rotary: tuple[Tensor, Tensor], state: tuple[Tensor, ...], seen: Tensor,
    heads: int, norm: Norm, norm2: Norm | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """Compute a Llama block.

    Returns the stream, the output of the MLP, and the token's keys and values (B, J, 1, P). The stream does
    not contain the output of the MLP yet; the next block adds it.
    """
    stream, row = project(stream, attention.qkv, norm, added, plus=injection)
    y, trace = attention_step(row, rotary, state, seen, heads)
    added = project(y, attention.out_proj)[1]
    stream, y = project(stream, mlp.gate, norm2, added, times=mlp.value)
    return stream, project(y, mlp.out)[1], trace
