"""Keeping z where tokens are frozen, in one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

from deqseq.kernels import launch


@triton.jit
def _freeze_kernel(z, out, frozen, rows, D, R: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    kept = tl.load(frozen + r, r < rows, 0).to(tl.int1)
    if tl.max(kept.to(tl.int32), 0) > 0:
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)[None, :]
            mask = kept[:, None] & (d < D)
            place = r[:, None] * D + d
            tl.store(out + place, tl.load(z + place, mask, 0.0), mask)


def freeze_(frozen: Tensor, z: Tensor, out: Tensor) -> Tensor:
    """Overwrite ``out`` (B, W, D), contiguous, with z where ``frozen`` (B, W); other tokens are not read."""
    width = z.shape[-1]
    rows = z.numel() // width
    block = min(1024, triton.next_power_of_2(width))
    tokens = max(1, 2048 // block)
    grid = (triton.cdiv(rows, tokens),)
    launch(_freeze_kernel, grid, z.contiguous(), out, frozen.contiguous(), rows, width, R=tokens, BLOCK=block)
    return out
