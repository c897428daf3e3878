"""Seeds of the batches of a random stream."""

_MASK = 0xFFFFFFFF


def _scramble(x: int) -> int:
    """The last step of the hash MurmurHash3: a bijection of 32-bit integers that mixes all bits."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def batch_seed(seed: int, index: int) -> int:
    """The seed of batch ``index`` in the stream with seed ``seed``. It does not depend on the machine.

    The result has 32 bits, because PyTorch's CPU generator uses only the low 32 bits of a seed. The first 2³²
    batches of a stream have different seeds.
    """
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return _scramble(_scramble(_scramble(high) ^ low) ^ (index & _MASK))
