"""Why the iteration of a token ended."""

import enum


class Status(enum.IntEnum):
    """Why the iteration of a token ended. ``Status(code).message`` says what to try."""

    RUNNING = 0
    CONVERGED = 1
    BUDGET_EXHAUSTED = 2
    NON_FINITE = 3
    COMPLETED = 4

    @property
    def message(self) -> str:
        """One sentence on what happened and what to try."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.RUNNING: "The token is still being iterated.",
    Status.CONVERGED: "The residual of the token met the tolerance, and all tokens before it had settled.",
    Status.BUDGET_EXHAUSTED: (
        "The residual was still above the tolerance when the iteration ended: raise max_iter, loosen the "
        "tolerance, use a smaller window, damp the solver, or train with more iterations or Jacobian "
        "regularisation."
    ),
    Status.NON_FINITE: (
        "The iterate became infinite or NaN: look for NaN in the inputs or weights, lower the learning "
        "rate, normalise the weights, or damp the solver."
    ),
    Status.COMPLETED: "The requested number of iterations was done; no tolerance was set.",
}
