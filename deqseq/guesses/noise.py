"""A guess that starts the search at random values."""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from deqseq.checks import check_count, check_positive
from deqseq.guess import Guess

_BLOCK = 64
"""In evaluation, noise is drawn for blocks of this many tokens. Every block has its own random generator."""


@dataclass(frozen=True)
class Noise(Guess):
    """Every token starts at Gaussian noise N(0, std²), drawn independently for every channel.

    In training, torch's global random generator draws new noise for every sequence. In evaluation, the noise
    of a token depends only on ``seed``, on the number of the start, and on the token's place in its sequence,
    counted from the first token of the call. So all sequences of a batch start at the same noise, and
    repeated calls give the same result.

    Args:
        std: standard deviation, above 0.
        seed: seed of the noise in evaluation.

    Raises:
        ValueError: ``std`` is not a finite number above 0, or ``seed`` is not a whole number >= 0.
    """

    std: float = 1.0
    seed: int = 0

    varies = True

    def __post_init__(self) -> None:
        check_positive("std", self.std)
        check_count("seed", self.seed, least=0)

    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor | None:
        if number is None:
            return self.std * torch.randn_like(x)
        length, width = x.shape[1:]
        blocks = [_block(self.seed, number, k, width) for k in range(-(-length // _BLOCK))]
        noise = self.std * torch.cat(blocks)[:length]
        return noise.to(x.device, x.dtype).expand_as(x)


@lru_cache(maxsize=128)
def _block(seed: int, number: int, block: int, width: int) -> Tensor:
    """Standard normal noise (64, width) for the tokens ``64 * block`` to ``64 * block + 63``.

    ``number`` is the number of the start.
    """
    digest = blake2b(f"{seed} {number} {block}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big"))
    with torch.inference_mode(False):  # autograd refuses tensors that were made in inference mode
        return torch.randn(_BLOCK, width, generator=generator, device="cpu", dtype=torch.float32)
