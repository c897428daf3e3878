"""The recurrence of Mamba2 (SSD; Dao & Gu, 2024, arXiv 2405.21060) in Triton, forward and backward.

Forward: one program per head and sequence carries the state in registers from chunk to chunk.

Backward: four kernels compute, in this order,

1. the state at the start of every chunk;
2. the gradient of the state at the end of every chunk, from the last chunk to the first;
3. the gradients of x and of the step sizes;
4. the gradients of b and c, summed over the heads of a group in a fixed order.

Log decays are base-2 logarithms. Their cumulative sums restart in every chunk.

Shapes: B sequences, L tokens, E inner width, H heads, P head dim, N state dim, G groups, W = E + 2 G N
convolved channels [x, b, c], J columns of the projection, Q tokens of a chunk.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch
from deqseq.ops.mixer.naive import MixerSizes, MixerWeights

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _steps_kernel(proj, inj, dt_bias, decay, step, total, L, J: tl.constexpr, H: tl.constexpr,
                  HAS_INJ: tl.constexpr, Q: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Step sizes (B, H, L), and cumulative sums of log2 decays (B, H, L). The sums restart in each chunk."""
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
    """Load a tile. Entries beyond ``rows`` and ``columns`` are 0.

    EVEN: all tiles lie inside the matrix, so the load needs no mask.
    """
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
    """The decays (Q, Q) in a chunk: entry (i, j) is the decay from token j to token i, and 0 if i < j."""
    return tl.exp2(tl.where(q[:, None] >= q[None, :], sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def _scan_kernel(conv, step, total, skip, before, y, L, HAS_STATE: tl.constexpr, W: tl.constexpr,
                 E: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                 EVEN: tl.constexpr, Q: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    h = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    g = h // (H // G)
    q = tl.arange(0, Q)
    row = q[:, None]
    n = tl.arange(0, BN)[None, :]
    p = tl.arange(0, BP)[None, :]
    through = tl.load(skip + h).to(tl.float32)
    state = tl.zeros((BN, BP), tl.float32)
    if HAS_STATE:  # ``before`` has shape (P, N) in each head; load its transpose (N, P)
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
def _states_kernel(conv, step, total, before, states, L, HAS_STATE: tl.constexpr, W: tl.constexpr,
                   E: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                   EVEN: tl.constexpr, Q: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
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
    """The gradient (N, P) of the state at the end of every chunk, from the last chunk to the first."""
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
                        shares, L, J: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
                        H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                        EVEN: tl.constexpr, Q: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
                        PRECISION: tl.constexpr):  # fmt: skip
    """For one head and chunk: the gradients of x and of the step sizes before softplus.

    The kernel also stores the chunk's contributions to the gradients of decay, skip and dt_bias.
    """
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
    pull = tl.dot(out, tl.trans(x), input_precision=PRECISION) * products  # not yet multiplied by dt
    by_column = tl.sum(pull, 0)
    by_row = tl.sum(pull * dt[None, :], 1)
    moved = left * tl.sum(x32 * into, 1)
    state = _load(states + slot, n1, p, N, P, P, EVEN)
    kept = tl.dot(c, state, input_precision=PRECISION)
    carried = tl.sum(out32 * kept, 1) * tl.exp2(sums)
    d_total = by_row + carried - (by_column + moved) * dt
    d_end = tl.exp2(end) * tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1), 0)
    d_end += tl.sum(moved * dt, 0)
    d_a = tl.sum(d_total, 0) - tl.cumsum(d_total, 0) + d_total + d_end
    # The gradient of a step size has two terms. The step size scales the token's input: by_column + moved. It
    # also determines the decay at the token: d_a * rate.
    d_raw = (by_column + moved + d_a * rate) * (1.0 - tl.exp(-dt))
    tl.store(d_proj + (b * L + start + q) * J + (J - H) + h, d_raw.to(d_proj.dtype.element_ty), q < rest)
    shares += (b * chunks + i) * 3 * H + h
    tl.store(shares, tl.sum(d_a * dt, 0))
    tl.store(shares + H, tl.sum(tl.sum(out32 * x32, 1), 0))
    tl.store(shares + 2 * H, tl.sum(tl.where(q < rest, d_raw, 0.0), 0))


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


def recurrence_options(sizes: MixerSizes, length: int, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time constants of the recurrence's kernels."""
    # Choose the number of tokens in a chunk. A chunk and the state must fit into the memory of one
    # multiprocessor, so large states get small chunks. Short sequences also get small chunks, of at least 16
    # tokens. If the head dim is below 64, chunks have at most 32 tokens: for head dim 32 and chunks of 64
    # tokens, Triton 3.6 compiles wrong code for Hopper GPUs (LOG.md).
    wide = sizes.d_state >= 64 and sizes.headdim >= 64
    small = sizes.d_state * sizes.headdim * dtype.itemsize <= 128 * 64 * 2
    chunk = min(16 if not small else 64 if wide else 32, max(16, triton.next_power_of_2(length)))
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


def steps(
    proj: Tensor, inj: Tensor | None, w: MixerWeights, sizes: MixerSizes, chunk: int
) -> tuple[Tensor, Tensor]:
    """Step sizes, and cumulative sums of log2 decays, both (B, H, L) float32.

    The sums restart in each chunk.
    """
    batch, length, columns = proj.shape
    step = torch.empty(batch, sizes.heads, length, device=proj.device, dtype=torch.float32)
    total = torch.empty_like(step)
    launch(
        _steps_kernel, (triton.cdiv(length, chunk), batch), proj, proj if inj is None else inj, w.dt_bias,
        w.decay, step, total, length, J=columns, H=sizes.heads, HAS_INJ=inj is not None, Q=chunk,
        BH=triton.next_power_of_2(sizes.heads),
    )  # fmt: skip
    return step, total


def scan(
    convolved: Tensor, step: Tensor, total: Tensor, w: MixerWeights, state: Tensor | None,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Compute y (B, L, E): the output of Mamba2's recurrence, plus skip * x."""
    batch, length, _ = convolved.shape
    y = convolved.new_empty(batch, length, options["E"])
    launch(
        _scan_kernel, (options["H"], batch), convolved, step, total, w.skip,
        convolved if state is None else state, y, length, HAS_STATE=state is not None, **options,
        num_stages=2,
    )  # fmt: skip
    return y


def scan_backward(
    convolved: Tensor, step: Tensor, total: Tensor, state: Tensor | None, d_y: Tensor, d_proj: Tensor,
    w: MixerWeights, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the gradient of ``convolved``, and one tensor (3, H): the gradients of decay, skip and dt_bias.

    Writes the gradient of the step sizes before softplus to the last H columns of ``d_proj``.
    """
    batch, length, _ = convolved.shape
    heads, chunks = options["H"], triton.cdiv(length, options["Q"])
    shape = (batch, chunks, heads, options["N"], options["P"])
    states, d_states = convolved.new_empty(shape), convolved.new_empty(shape)
    launch(
        _states_kernel, (heads, batch), convolved, step, total, convolved if state is None else state, states,
        length, HAS_STATE=state is not None, **options,
    )  # fmt: skip
    launch(_state_gradients_kernel, (heads, batch), convolved, total, d_y, d_states, length, **options)
    d_conv = torch.empty_like(convolved)
    shares = torch.empty(batch * chunks, 3, heads, device=d_y.device, dtype=torch.float32)
    launch(
        _x_gradients_kernel, (heads, chunks, batch), convolved, step, total, w.decay, w.skip, states,
        d_states, d_y, d_conv, d_proj, shares, length, J=d_proj.shape[2], **options, num_stages=1,
    )  # fmt: skip
    launch(
        _bc_gradients_kernel, (options["G"], chunks, batch), convolved, step, total, states, d_states, d_y,
        d_conv, length, **options, num_warps=8,
    )  # fmt: skip
    return d_conv, shares.sum(0)
