"""The Mamba2 mixer in Triton: four fused kernels between the two projections.

The first kernel adds the injection and convolves, the second computes step sizes, the third runs the
recurrence, and the fourth gates and normalises. To save memory, the autograd graph keeps only the mixer's
inputs and the recurrence's output. The backward pass recomputes the rest.

Shapes: B sequences, L tokens, E inner width, H heads, N state dim, G groups of heads that share b and c.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deqseq.kernels import first_derivative_only
from deqseq.ops.mixer.naive import LayerTrace, MixerSizes, MixerWeights
from deqseq.ops.mixer.triton_convolution import convolve, convolve_backward
from deqseq.ops.mixer.triton_gated_norm import gated_norm, gated_norm_backward
from deqseq.ops.mixer.triton_recurrence import recurrence_options, scan, scan_backward, steps

PART = 160 * 2**20
"""The backward pass works on one part of the batch at a time. The output of a part's input projection has
about this many bytes. The backward pass of the part needs about ten times this memory."""


def _forward(
    u: Tensor, inj: Tensor | None, tail: Tensor | None, state: Tensor | None, sizes: MixerSizes,
    w: MixerWeights,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """Compute the mixer.

    Returns six values. The first is the mixer's output. The next three are for the trace: the projection, the
    convolved projection and the step sizes. The last two are for the backward pass: the recurrence's output y
    and the kernels' constants.
    """
    proj, inj = _project(u, inj, w)
    options = recurrence_options(sizes, proj.shape[1], u.dtype)
    convolved = convolve(proj, inj, w, tail, sizes)
    step, total = steps(proj, inj, w, sizes, options["Q"])
    y = scan(convolved, step, total, w, state, options)
    return F.linear(gated_norm(y, proj, inj, w.norm, sizes), w.out_proj), proj, convolved, step, y, options


def _project(u: Tensor, inj: Tensor | None, w: MixerWeights) -> tuple[Tensor, Tensor | None]:
    """Returns the projection and the injection, whose sum is the kernels' input.

    If ``u`` is one token of zeros that stands for all tokens, the sum is the injection.
    """
    if inj is not None and u.shape[:2] != inj.shape[:2]:
        return inj, None
    return F.linear(u, w.in_proj), inj


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, inj: Tensor | None, tail: Tensor | None, state: Tensor | None, sizes: MixerSizes,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Compute the mixer.

        Returns the mixer's output. With a state, also three values for the trace: the projection, the
        convolved projection and the step sizes.
        """
        *out, y, options = _forward(u, inj, tail, state, sizes, MixerWeights(*weights))
        out = out if state is not None else out[:1]
        ctx.save_for_backward(u, inj, tail, state, y, *weights)
        ctx.sizes = sizes
        ctx.options = options
        ctx.mark_non_differentiable(*out[1:])
        ctx.set_materialize_grads(False)  # the gradient of an unused output is None instead of zeros
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *of_trace: None) -> tuple[Tensor | None, ...]:
        first_derivative_only()
        if grad is None:
            return (None,) * (5 + len(MixerWeights._fields))
        u, inj, tail, state, y, *weights = ctx.saved_tensors
        w = MixerWeights(*weights)
        grad = grad.contiguous()
        d_proj, normed = y.new_empty(*y.shape[:2], w.in_proj.shape[0]), torch.empty_like(y)
        batch = len(y)
        rows = -(-batch // -(-d_proj.numel() * d_proj.itemsize // PART))  # sequences in each part
        sums: list[tuple[Tensor, ...]] = []
        for i in range(0, batch, rows):
            part = slice(i, i + rows)
            inputs = [None if t is None else t[part] for t in (u, inj, tail, state)]
            outputs = d_proj[part], normed[part]
            sums.append(_recompute(inputs, y[part], grad[part], outputs, w, ctx.sizes, ctx.options))
        of_norm, of_conv, (d_decay, d_skip, d_bias) = map(_sum, zip(*sums, strict=True))
        zeros = u.shape[:2] != y.shape[:2]  # u is one token of zeros
        d_in = torch.zeros_like(w.in_proj) if zeros else _outer(d_proj, u)
        grads = MixerWeights(
            in_proj=d_in, conv=of_conv[:, :4], conv_bias=of_conv[:, 4], decay=d_decay, dt_bias=d_bias,
            skip=d_skip, norm=of_norm, out_proj=_outer(grad, normed),
        )  # fmt: skip
        del normed
        d_u = None
        if ctx.needs_input_grad[0]:
            d_u = torch.zeros_like(u) if zeros else d_proj @ w.in_proj
        return (
            d_u, d_proj if inj is not None else None, None, None, None,
            *(g.to(weight.dtype) for g, weight in zip(grads, weights, strict=True)),
        )  # fmt: skip


def _recompute(
    inputs: list[Tensor | None], y: Tensor, grad: Tensor, outputs: tuple[Tensor, Tensor], w: MixerWeights,
    sizes: MixerSizes, options: dict[str, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the backward pass for one part of the batch.

    Writes the projection's gradient and the output of the gated norm to ``outputs``. Returns three gradients,
    each summed over all tokens of the part:

    - the norm's weight (E,);
    - the convolution's four taps and bias (E + 2 G N, 5);
    - decay, skip and dt_bias (3, H).
    """
    u, inj, tail, state = inputs
    assert u is not None
    d_proj, normed = outputs
    proj, inj = _project(u, inj, w)
    d_y, of_norm = gated_norm_backward(grad @ w.out_proj, y, proj, inj, w.norm, normed, d_proj, sizes)
    convolved = convolve(proj, inj, w, tail, sizes)
    step, total = steps(proj, inj, w, sizes, options["Q"])
    d_conv, of_heads = scan_backward(convolved, step, total, state, d_y, d_proj, w, options)
    del convolved, d_y
    return of_norm, convolve_backward(d_conv, proj, inj, tail, w, d_proj, sizes), of_heads


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Outer products (I, J) of left (B, L, I) and right (B, L, J), summed over tokens."""
    return left.flatten(0, 1).t() @ right.flatten(0, 1)


def mix(
    u: Tensor, inj: Tensor | None, weights: MixerWeights, state: tuple[Tensor, ...] | None, sizes: MixerSizes
) -> tuple[Tensor, LayerTrace | None]:
    """Compute the mixer in Triton. The convolution may have at most four taps.

    The result and the arguments are those of :func:`deqseq.ops.mixer.mix`.
    """
    tail, ssm = (None, None) if state is None else state
    missing = 4 - weights.conv.shape[1]
    if missing:
        weights = weights._replace(conv=F.pad(weights.conv, (missing, 0)))
        tail = None if tail is None else F.pad(tail, (0, 0, missing, 0))
    u = u.contiguous()
    if torch.is_grad_enabled():
        out, *of_trace = _Mix.apply(u, inj, tail, ssm, sizes, *weights)
    else:
        out, *of_trace = _forward(u, inj, tail, ssm, sizes, weights)[:4]
    if state is None:
        return out, None
    proj, convolved, step = of_trace
    shared = sizes.n_groups * sizes.d_state
    x, b, _ = convolved.split([sizes.inner, shared, shared], -1)
    inputs = slice(sizes.inner, sizes.inner + sizes.conv_width)
    trace = LayerTrace(
        tuple(part[..., inputs] for part in (proj, inj) if part is not None),
        x.unflatten(-1, (sizes.heads, sizes.headdim)),
        b.unflatten(-1, (sizes.n_groups, sizes.d_state)),
        step.transpose(1, 2),
        weights.decay.expand(len(u), -1),
    )
    return out, trace
