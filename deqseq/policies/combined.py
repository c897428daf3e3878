"""Two policies at once: ``first & second`` and ``first | second``."""

from torch import Tensor

from deqseq.policy import ConvergencePolicy, FixedIterations, Judgement, policies


class _Combined(ConvergencePolicy):
    def __init__(self, first: ConvergencePolicy, second: ConvergencePolicy) -> None:
        self.first, self.second = first, second = policies.create(first), policies.create(second)
        self.causal = first.causal and second.causal
        self.capturable = first.capturable and second.capturable
        self.check_every = min(filter(None, (first.check_every, second.check_every)), default=None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.first!r}, {self.second!r}, max_iter={self.max_iter})"

    def _judge_both(self, *evaluation: Tensor) -> tuple[Judgement, Judgement]:
        return self.first.judge(*evaluation), self.second.judge(*evaluation)


class Both(_Combined):
    """``first & second``: a token may settle when both policies let it settle.

    A token has converged when it meets the tolerances of both policies. If one policy is ``FixedIterations``,
    which has no tolerance, only the tolerance of the other policy counts. ``max_iter`` is the larger
    ``max_iter`` of the two policies.
    """

    def __init__(self, first: ConvergencePolicy, second: ConvergencePolicy) -> None:
        super().__init__(first, second)
        self.max_iter = max(self.first.max_iter, self.second.max_iter)
        self.min_iter = max(self.first.min_iter, self.second.min_iter)

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        first, second = self._judge_both(z, fz, iterations, active)
        if isinstance(self.first, FixedIterations):
            converged = second.converged
        elif isinstance(self.second, FixedIterations):
            converged = first.converged
        else:
            converged = first.converged & second.converged
        return Judgement(first.residual, converged, first.may_settle & second.may_settle)


class Either(_Combined):
    """``first | second``: a token may settle when at least one policy lets it settle.

    A token has converged when it meets the tolerance of at least one policy. ``max_iter`` is the smaller
    ``max_iter`` of the two policies.
    """

    def __init__(self, first: ConvergencePolicy, second: ConvergencePolicy) -> None:
        super().__init__(first, second)
        self.max_iter = min(self.first.max_iter, self.second.max_iter)
        self.min_iter = min(self.first.min_iter, self.second.min_iter)

    def judge(self, z: Tensor, fz: Tensor, iterations: Tensor, active: Tensor) -> Judgement:
        first, second = self._judge_both(z, fz, iterations, active)
        return Judgement(
            first.residual, first.converged | second.converged, first.may_settle | second.may_settle
        )
