"""Triton kernels that add new tokens to states, in place. They skip sequences whose ``count`` is 0.

Shapes: B sequences, W tokens of the evaluation, H heads, G groups of heads, P head dim, N state dim, K taps,
C convolved channels; J key/value heads, S slots.
"""

import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch
from deqseq.ops.mixer.naive import LayerTrace


@triton.jit
def _recurrent_kernel(tail, ssm, first, second, x, b, step, decay, count, first_b, first_t, second_b,
                      second_t, x_b, x_t, b_b, b_t, step_b, step_t, step_h, TAPS: tl.constexpr,
                      C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                      SUMMED: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
                      BC: tl.constexpr, BT: tl.constexpr):  # fmt: skip
    """Program h < H updates the SSM state of head h. Each further program updates BC channels of the tail."""
    h = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    consumed = tl.load(count + i)
    if consumed > 0:
        if h < H:
            p = tl.arange(0, BP)
            n = tl.arange(0, BN)
            place = ((i * H + h) * P + p[:, None]) * N + n[None, :]
            mask = (p[:, None] < P) & (n[None, :] < N)
            state = tl.load(ssm + place, mask, 0.0).to(tl.float32)
            rate = tl.load(decay + h).to(tl.float32)
            for t in range(consumed):
                dt = tl.load(step + i * step_b + t * step_t + h * step_h).to(tl.float32)
                into = tl.load(x + i * x_b + t * x_t + h * P + p, p < P, 0.0).to(tl.float32)
                along = tl.load(b + i * b_b + t * b_t + (h // (H // G)) * N + n, n < N, 0.0).to(tl.float32)
                state = state * tl.exp(dt * rate) + (dt * into)[:, None] * along[None, :]
            tl.store(ssm + place, state.to(ssm.dtype.element_ty), mask)
        elif TAPS > 0:
            c = (h - H) * BC + tl.arange(0, BC)[None, :]
            k = tl.arange(0, BT)[:, None]
            at = k + (consumed - TAPS).to(tl.int32)  # index of the token; negative: read the old tail
            real = (k < TAPS) & (c < C)
            kept = tail + i * TAPS * C + c
            new = tl.load(first + i * first_b + at * first_t + c, real & (at >= 0), 0.0).to(tl.float32)
            if SUMMED:
                new += tl.load(second + i * second_b + at * second_t + c, real & (at >= 0), 0.0).to(
                    tl.float32
                )
            new += tl.load(kept + (at + TAPS) * C, real & (at < 0), 0.0).to(tl.float32)
            tl.debug_barrier()  # all threads read the old tail before any thread overwrites it
            tl.store(kept + k * C, new.to(tail.dtype.element_ty), real)


def recurrent_(tail: Tensor, ssm: Tensor, trace: LayerTrace, count: Tensor) -> None:
    """Add the first ``count`` (B,) tokens to a layer's tail (B, K-1, C) and SSM state (B, H, P, N).

    The tail is the last K-1 inputs of the convolution.
    """
    batch, heads, headdim, d_state = ssm.shape
    taps, channels = tail.shape[1:]
    first, second = trace.conv[0], trace.conv[-1]
    block = 256
    launch(
        _recurrent_kernel, (heads + triton.cdiv(channels, block) * (taps > 0), batch), tail, ssm, first,
        second, trace.x, trace.b, trace.step, trace.decay, count, *first.stride()[:2], *second.stride()[:2],
        *trace.x.stride()[:2], *trace.b.stride()[:2], *trace.step.stride(), TAPS=taps, C=channels, H=heads,
        G=trace.b.shape[2], N=d_state, P=headdim, SUMMED=len(trace.conv) > 1,
        BN=triton.next_power_of_2(d_state), BP=triton.next_power_of_2(headdim), BC=block,
        BT=triton.next_power_of_2(max(1, taps)),
    )  # fmt: skip


@triton.jit
def _append_kernel(keys, values, k, v, seen, count, S, k_b, k_j, k_t, v_b, v_j, v_t, J: tl.constexpr,
                   P: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    j = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    consumed = tl.minimum(tl.load(count + i), S - tl.load(seen + i))  # never write beyond slot S-1
    if consumed > 0:
        p = tl.arange(0, BP)
        slot = ((i * J + j) * S + tl.load(seen + i)) * P + p
        for t in range(consumed):
            key = tl.load(k + i * k_b + j * k_j + t * k_t + p, p < P, 0.0)
            tl.store(keys + slot + t * P, key.to(keys.dtype.element_ty), p < P)
            value = tl.load(v + i * v_b + j * v_j + t * v_t + p, p < P, 0.0)
            tl.store(values + slot + t * P, value.to(values.dtype.element_ty), p < P)


def append_(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, seen: Tensor, count: Tensor) -> None:
    """Write the first ``count`` (B,) tokens of k, v (B, J, W, P) into keys, values (B, J, S, P).

    The first token goes to slot ``seen`` (B,), and the others go to the slots after it.
    """
    batch, heads, slots, headdim = keys.shape
    launch(
        _append_kernel, (heads, batch), keys, values, k, v, seen, count, slots, *k.stride()[:3],
        *v.stride()[:3], J=heads, P=headdim, BP=triton.next_power_of_2(headdim),
    )  # fmt: skip
