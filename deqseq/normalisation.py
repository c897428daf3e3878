"""Weight normalisation of a backbone's body (w = g v / ||v|| per output row; Salimans & Kingma, 2016)."""

from torch import nn
from torch.nn.utils.parametrizations import weight_norm


def normalise_weights(module: nn.Module) -> nn.Module:
    """Put torch's weight-norm parametrisation on every Linear and Conv1d of ``module``, in place.

    The function computed does not change: g starts at the norms of the rows. Reading ``.weight`` computes
    the effective weight anew, so backbones read it once per forward pass, in ``prepare``. On GPUs torch
    computes it in single precision, even for float64.
    """
    for child in module.modules():
        if isinstance(child, (nn.Linear, nn.Conv1d)):
            weight_norm(child)
    return module
