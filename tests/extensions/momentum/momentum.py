"""A solver: iteration with momentum."""

import torch

from deqseq import Solver


class Momentum(Solver):
    """v <- beta v + (f(z) - z), then z <- z + v."""

    differentiable = True  # autograd through `step` is exact
    capturable = True  # `step` never waits for the GPU

    def __init__(self, beta=0.1):
        self.beta = beta

    def init(self, z):
        return (torch.zeros_like(z),)

    def step(self, z, fz, state, progress):
        velocity = self.beta * state[0] + (fz - z)
        return z + velocity, (velocity,)
