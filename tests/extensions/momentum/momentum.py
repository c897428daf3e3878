"""A package with one solver: fixed-point iteration with momentum."""

import torch

from deqseq import Solver


class Momentum(Solver):
    """Updates a velocity v and then the iterate z: v <- beta v + (f(z) - z), z <- z + v."""

    differentiable = True  # autograd through `step` is exact
    capturable = True  # a CUDA graph can record `step`, because it never waits for the GPU

    def __init__(self, beta=0.1):
        self.beta = beta

    def init(self, z):
        return (torch.zeros_like(z),)

    def step(self, z, fz, state, progress):
        velocity = state[0].where(~progress.entered[..., None], 0)  # new tokens have no velocity yet
        velocity = self.beta * velocity + (fz - z)
        return z + velocity, (velocity,)
