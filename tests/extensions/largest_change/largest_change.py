"""A convergence policy that limits the largest change of a token's entries."""

from deqseq import ConvergencePolicy, Judgement


class LargestChange(ConvergencePolicy):
    """A token has converged when no entry changes by more than `rtol` times the token's largest entry."""

    capturable = True  # `judge` never waits for the GPU

    def __init__(self, rtol=1e-3, max_iter=64):
        self.rtol, self.max_iter = rtol, max_iter

    def judge(self, z, fz, iterations, active):
        change = (fz - z).abs().amax(-1).float()  # (B, W)
        residual = change / fz.abs().amax(-1).float().clamp_min(1e-12)
        return Judgement(residual, residual <= self.rtol)
