"""Use the solvers of the torchdeq package (Geng & Kolter, 2023, arXiv 2310.18605) in deqseq."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deqseq.checks import MOST_STEPS, check_count, check_flag, check_not_negative, check_positive
from deqseq.solver import Progress, Solver, SolverState

# Arguments of torchdeq's solvers that users cannot set, because our loop calls f and decides when to stop.
_OWN = {"func", "x0", "max_iter", "tol", "stop_mode", "indexing", "return_final", "kwargs"}
_NEVER = 1_000_000
_REFUSED = {"simple_fixed_point_iter"}  # calls f with an argument tau, which f does not take
# torchdeq's own solvers do not check their options, so these functions do. ``m`` must be at least 2, because
# torchdeq's Anderson writes two entries of its history at once.
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "m": partial(check_count, least=2, most=MOST_STEPS),
    "LBFGS_thres": partial(check_count, most=MOST_STEPS),
    "lam": check_not_negative,
    "tau": check_positive,
    "ls": check_flag,
}


class TorchDEQ(Solver):
    """Runs a torchdeq solver inside our loop, for example ``solver="torchdeq:anderson"``.

    A solver of torchdeq has its own loop and calls f itself. This adapter runs the solver as a coroutine that
    pauses at every call of f. During the pause, our loop evaluates f, tests the residual and counts the
    iteration. Only our loop decides when to stop: torchdeq gets a tolerance of zero.

    torchdeq's solvers combine all tokens of a sequence, so iterates depend on later tokens. Therefore causal
    training refuses these solvers. They do not work with windows or with the gradient strategy ``unrolled``.

    Args:
        method: ``"fixed_point_iter"``, ``"anderson"``, ``"broyden"``, or a name registered with torchdeq.
        options: the solver's own options, such as ``m``, ``lam`` and ``tau`` of Anderson.

    Raises:
        ValueError: torchdeq or greenlet is not installed; unknown method or option (torchdeq itself ignores
            unknown options); a wrong value of an option.
    """

    causal = False
    windowed = False

    def __init__(self, method: str, **options: Any) -> None:
        try:
            import greenlet  # noqa: F401 - suspends torchdeq's solvers
            from torchdeq.solver import _solvers
        except ImportError as error:
            raise ValueError(
                f"solver 'torchdeq:...' needs torchdeq: pip install 'deqseq[torchdeq]' ({error})"
            ) from error
        known = {name: solver for name, solver in _solvers.items() if name not in _REFUSED}
        if not isinstance(method, str) or method not in known:
            raise ValueError(f"unknown torchdeq solver {method!r}; known: {', '.join(sorted(known))}")
        self.method = method
        self.options = options
        self._solve: Callable[..., Any] = known[method]
        takes = set(inspect.signature(self._solve).parameters) - _OWN
        unknown = set(options) - takes
        if unknown:
            raise ValueError(
                f"torchdeq's {method} takes no option {', '.join(sorted(unknown))}; "
                f"it takes: {', '.join(sorted(takes))}"
            )
        if "LBFGS_thres" in takes:
            # Store at most 32 steps. By default, torchdeq allocates memory for max_iter = _NEVER steps.
            self.options = {"LBFGS_thres": 32, **options}
        if self._solve.__module__.partition(".")[0] == "torchdeq":  # skip solvers that users have registered
            for name in set(options) & set(_CHECKS):
                _CHECKS[name](name, options[name])

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"TorchDEQ({self.method!r}{options})"

    def init(self, z: Tensor) -> SolverState:
        return None

    def step(
        self, z: Tensor, fz: Tensor, state: SolverState, progress: Progress
    ) -> tuple[Tensor, SolverState]:
        if fz.requires_grad:
            raise ValueError(f"{self} cannot be unrolled with a graph: use Picard or Anderson")
        # Set f(z) = z at padding. The residual there is then zero. torchdeq itself does not handle padding.
        fz = torch.where((progress.iterations == 0)[..., None], z, fz)
        dtype = torch.promote_types(z.dtype, torch.float32)
        if state is None:
            state = _Coroutine(lambda f: self._solve(f, z.to(dtype), _NEVER, 0.0, **self.options))
        proposal = state.send(fz.to(dtype))
        if proposal is None:
            return fz, state
        # Use f(z) where the proposal is not finite. torchdeq's Broyden divides by values that become zero at
        # convergence.
        proposal = proposal.view_as(z).to(z.dtype)
        return torch.where(torch.isfinite(proposal).all(-1, keepdim=True), proposal, fz), state


class _Coroutine:
    """Runs a torchdeq solver, and suspends it at every call of f."""

    def __init__(self, solve: Callable[[Callable[[Tensor], Tensor]], Any]) -> None:
        from greenlet import getcurrent, greenlet

        def f(z: Tensor) -> Tensor:
            fz: Tensor = getcurrent().parent.switch(z.clone())
            return fz

        def run() -> None:
            solve(f)

        self._solver, self._getcurrent = greenlet(run), getcurrent
        self._resume()  # runs the solver up to its first call of f; ``send`` then passes f(z0) to the solver

    def send(self, fz: Tensor) -> Tensor | None:
        """Resume the solver with ``fz``. Returns its next iterate, or ``None`` if the solver has ended."""
        return None if self._solver.dead else self._resume(fz)

    def _resume(self, *values: Tensor) -> Tensor | None:
        self._solver.parent = self._getcurrent()
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores the mode if the solver changes it
            iterate: Tensor | None = self._solver.switch(*values)
        return iterate
