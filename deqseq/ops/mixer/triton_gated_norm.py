"""The gate and norm of Mamba2 in Triton, forward and backward.

Shapes: B sequences, L tokens, E inner width, J columns of the projection; the first E columns are the gate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch
from deqseq.ops.mixer.naive import MixerSizes
from deqseq.ops.mixer.triton_convolution import silu


@triton.jit
def _gated_norm_kernel(y, proj, inj, weight, out, eps, J: tl.constexpr, E: tl.constexpr,
                       GROUP: tl.constexpr, HAS_INJ: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    e = tl.program_id(1) * GROUP + i
    mask = i < GROUP
    gate = tl.load(proj + row * J + e, mask, 0.0).to(tl.float32)
    if HAS_INJ:
        gate += tl.load(inj + row * J + e, mask, 0.0).to(tl.float32)
    v = tl.load(y + row * E + e, mask, 0.0).to(tl.float32) * silu(gate)
    scale = tl.rsqrt(tl.sum(v * v, 0) / GROUP + eps)
    w = tl.load(weight + e, mask, 0.0).to(tl.float32)
    tl.store(out + row * E + e, (v * scale * w).to(out.dtype.element_ty), mask)


@triton.jit
def _gated_norm_backward_kernel(grad, y, proj, inj, weight, out, d_y, d_proj, d_weight, rows, eps,
                                J: tl.constexpr, E: tl.constexpr, GROUP: tl.constexpr,
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


def gated_norm(y: Tensor, proj: Tensor, inj: Tensor | None, weight: Tensor, sizes: MixerSizes) -> Tensor:
    """RMSNorm(y * silu(gate)) (B, L, E), where gate is the first E columns of proj + inj."""
    out = torch.empty_like(y)
    rows, columns = proj.shape[0] * proj.shape[1], proj.shape[2]
    group = sizes.inner // sizes.norm_groups
    launch(
        _gated_norm_kernel, (rows, sizes.norm_groups), y, proj, proj if inj is None else inj, weight, out,
        sizes.norm_eps, J=columns, E=sizes.inner, GROUP=group, HAS_INJ=inj is not None,
        BLOCK=triton.next_power_of_2(group),
    )  # fmt: skip
    return out


def gated_norm_backward(
    grad: Tensor, y: Tensor, proj: Tensor, inj: Tensor | None, weight: Tensor, out: Tensor, d_proj: Tensor,
    sizes: MixerSizes,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of y and of the norm's weight.

    Writes the gate's gradient to the first E columns of ``d_proj``, and the norm's output to ``out``.
    """
    d_y = torch.empty_like(y)
    rows, columns = proj.shape[0] * proj.shape[1], proj.shape[2]
    group = sizes.inner // sizes.norm_groups
    share = max(8, triton.cdiv(rows, 4096))
    parts = triton.cdiv(rows, share)
    d_weight = torch.empty(parts, sizes.inner, device=y.device, dtype=torch.float32)
    launch(
        _gated_norm_backward_kernel, (parts, sizes.norm_groups), grad, y, proj, proj if inj is None else inj,
        weight, out, d_y, d_proj, d_weight, rows, sizes.norm_eps, J=columns, E=sizes.inner, GROUP=group,
        HAS_INJ=inj is not None, BLOCK=triton.next_power_of_2(group), ROWS=share,
    )  # fmt: skip
    return d_y, d_weight.sum(0)
