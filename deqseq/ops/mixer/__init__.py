"""The Mamba2 mixer (Dao & Gu, 2024, arXiv 2405.21060).

Shapes: B sequences, W tokens, D width, E inner width, H heads, P head dim, N state dim, G groups, K taps.
"""

from importlib import import_module

from torch import Tensor

from deqseq.ops.mixer import naive
from deqseq.ops.mixer.naive import LayerTrace, MixerSizes, MixerWeights


def mix(
    u: Tensor, weights: MixerWeights, injection: Tensor | None, state: tuple[Tensor, ...] | None,
    sizes: MixerSizes, implementation: str,
) -> tuple[Tensor, LayerTrace | None]:  # fmt: skip
    """The mixer's output (B, W, D) and the trace, the values for a later update of ``state``.

    The trace is ``None`` if there is no state.

    Args:
        u: (B, W, D) the mixer's input. With an injection and no state, it may be one token (1, 1, D) of
            zeros, which stands for all tokens.
        injection: (B, W, 2 E + 2 G N + H) added to the projection of ``u``.
        state: the state before the first token, in two tensors: the last K-1 inputs of the convolution
            (B, K-1, E + 2 G N), and the SSM state (B, H, P, N). ``None``: both are zero.
        implementation: a name in :mod:`deqseq.kernels`. With more than four taps, ``"triton"`` uses plain
            PyTorch instead.
    """
    if implementation == "triton" and weights.conv.shape[1] <= 4:
        from deqseq.ops.mixer.triton import mix as fused

        return fused(u, injection, weights, state, sizes)
    ours = implementation in ("torch", "triton")
    parts = naive if ours else import_module(f"deqseq.ops.mixer.{implementation}")
    return naive.mix(u, weights, injection, state, sizes, parts.convolve, parts.recur)
