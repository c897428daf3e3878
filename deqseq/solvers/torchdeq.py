"""Any solver of the torchdeq package (Geng & Kolter, 2023, arXiv 2310.18605), by name."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from deqseq.solver import Progress, Solver, SolverState

# What the adapter sets itself: the loop owns stopping and budget.
_OWN = {"func", "x0", "max_iter", "tol", "stop_mode", "indexing", "return_final", "kwargs"}
_NEVER = 1_000_000


class TorchDEQ(Solver):
    """A torchdeq solver inside our loop: ``solver="torchdeq:anderson"``.

    torchdeq's solvers own their loop and call f. Here the call is turned inside out: the solver runs in
    a thread that stops at every call of f and hands the iterate to our loop, which evaluates f, judges
    and counts as for any other solver. Only the algebra is torchdeq's; its tolerance never stops it.

    torchdeq mixes whole sequences, so that early tokens' iterates depend on later ones: in causal
    training it is refused, as is a window. It cannot be unrolled with a graph.

    Args:
        method: ``"fixed_point_iter"``, ``"anderson"``, ``"broyden"``, or a name registered with torchdeq.
        options: the solver's own, such as ``m``, ``lam`` and ``tau`` of Anderson.

    Raises:
        ValueError: unknown method or option (torchdeq itself ignores the latter).
        ImportError: torchdeq is not installed.
    """

    causal = False
    windowed = False

    def __init__(self, method: str, **options: Any) -> None:
        try:
            from torchdeq.solver import _solvers as known
        except ImportError as error:
            raise ImportError(
                "solver 'torchdeq:...' needs the torchdeq package: pip install 'deqseq[torchdeq]'"
            ) from error
        if method not in known:
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
            # torchdeq would allocate as many pairs as iterations.
            self.options = {"LBFGS_thres": 32, **options}

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
        # torchdeq knows no padding: what never takes part is answered as solved, and weighs nothing.
        fz = torch.where((progress.iterations == 0)[..., None], z, fz)
        wide = torch.promote_types(z.dtype, torch.float32)  # of its systems
        if state is None:
            # A thread starts on the default stream; the solver must queue its work where f does.
            stream = torch.cuda.current_stream(z.device) if z.is_cuda else None

            def solve(f: Callable[[Tensor], Tensor]) -> None:
                with torch.cuda.stream(stream):
                    self._solve(f, z.to(wide), _NEVER, 0.0, **self.options)

            state = _Conversation(solve)
        proposal = state.reply(fz.to(wide))
        if proposal is None:
            return fz, state
        # torchdeq's Broyden divides by quantities that vanish at convergence.
        proposal = proposal.view_as(z).to(z.dtype)
        return torch.where(torch.isfinite(proposal).all(-1, keepdim=True), proposal, fz), state


class _Conversation:
    """A solver in a thread: it asks for f at an iterate, we reply."""

    def __init__(self, solve: Callable[[Callable[[Tensor], Tensor]], Any]) -> None:
        self._questions: SimpleQueue[Tensor | BaseException | None] = SimpleQueue()
        self._replies: SimpleQueue[Tensor | None] = SimpleQueue()
        # The thread knows the queues and not this object, so that dropping the object ends it.
        arguments = (solve, self._questions, self._replies)
        threading.Thread(target=_converse, args=arguments, daemon=True).start()
        self._next()  # f at the initial guess: the loop has evaluated it already

    def reply(self, fz: Tensor) -> Tensor | None:
        """Answer the last question; returns the next iterate, ``None`` once the solver has ended."""
        self._replies.put(fz)
        return self._next()

    def _next(self) -> Tensor | None:
        question = self._questions.get()
        if isinstance(question, BaseException):
            raise question
        if question is None:
            self._questions.put(None)
        return question

    def __del__(self) -> None:
        self._replies.put(None)


class _Abandoned(BaseException):
    """The loop has stopped; nobody will reply."""


def _converse(
    solve: Callable[[Callable[[Tensor], Tensor]], Any],
    questions: SimpleQueue[Tensor | BaseException | None],
    replies: SimpleQueue[Tensor | None],
) -> None:
    def ask(z: Tensor) -> Tensor:
        questions.put(z.clone())
        fz = replies.get()
        if fz is None:
            raise _Abandoned
        return fz

    try:
        with torch.no_grad():
            solve(ask)
        questions.put(None)
    except _Abandoned:
        pass
    except BaseException as error:  # raised again in the loop's thread
        questions.put(error)
