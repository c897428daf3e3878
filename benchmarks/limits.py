"""What one evaluation of f moves and computes, and how fast the device does both: for limits of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deqseq import Backbone

if TYPE_CHECKING:
    from speed import Bench


def parts(backbone: Backbone, batch: int, length: int) -> dict[str, tuple[float, float]]:
    """Count the bytes that each part of f moves under autocast, and the arithmetic operations of each part.

    The count assumes that a matrix product reads and writes each of its tensors once, and that all operations
    between two matrix products are fused. The residual stream is float32, and all other tensors are bfloat16.
    """
    T, D, n = batch * length, backbone.d_model, len(backbone.layers)
    mixer = backbone.layers[0].mixer

    def matrix(into: int, out: int, gates: int = 0) -> tuple[float, float]:
        """Bytes and operations of a matrix product with ``into`` input and ``out`` output features.

        Each block does the product once. The counts are sums over all blocks. ``gates``: number of output
        features that are not written to memory, because the fused gate consumes them.
        """
        return n * 2 * (T * (into + out - gates) + into * out), n * 2 * T * into * out

    def norms(count: int) -> tuple[float, float]:
        """Bytes and operations of all ``count`` norms together.

        Every norm after the first also adds the output of the part before it to the residual stream. The
        last norm does not write the residual stream. It writes only its own result, in float32.
        """
        return T * D * (6 + (count - 2) * 12 + 10), T * D * 5 * count

    if hasattr(mixer, "sizes"):
        s, taps, chunk = mixer.sizes, mixer.conv1d.kernel_size[0], 64
        columns, shared = mixer.in_proj.out_features, s.n_groups * s.d_state
        moved = 2 * (2 * columns + s.inner)  # bytes per token: read projection and injection, write y
        recurrence = 4 * s.inner * s.d_state + 2 * chunk * (shared + s.inner)
        operations = 2 * taps * s.conv_width + recurrence + 8 * s.inner
        return {
            "norms": norms(n + 1),
            "projection in": matrix(D, columns),
            "convolution, recurrence, gate, norm": (n * T * moved, n * T * operations),
            "projection out": matrix(s.inner, D),
        }
    qkv, hidden = (mixer.n_head + 2 * mixer.n_kv_head) * mixer.headdim, backbone.layers[0].mlp.w1.out_features
    return {
        "norms": norms(2 * n + 1),
        "queries, keys, values": matrix(D, qkv),
        "attention": (n * T * 2 * (2 * qkv + D), n * T * 2 * length * D),  # causal: half of all scores
        "projection out": matrix(D, D),
        "MLP in, gate": matrix(D, 2 * hidden, gates=hidden),
        "MLP out": matrix(hidden, D),
    }


def rates(bench: Bench) -> tuple[float, float]:
    """Measure two speeds: bytes per ms of a copy, and operations per ms of a bfloat16 matrix product."""
    size, n = (2**22, 256) if bench.quick else (2**30, 8192)
    source, target = torch.empty(2, size, device=bench.device, dtype=torch.uint8)
    a, b = torch.randn(2, n, n, device=bench.device, dtype=torch.bfloat16)
    copied = bench.milliseconds(lambda: target.copy_(source))
    return 2 * size / copied, 2 * n**3 / bench.milliseconds(lambda: a @ b)
