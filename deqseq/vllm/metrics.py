"""Counters of iterations for Prometheus.

Every process that runs a model counts its iterations. vLLM's server is another process. The server shows the
counters at ``/metrics`` if ``PROMETHEUS_MULTIPROC_DIR`` names an empty folder when the server starts.
"""

from functools import cache

import torch
from prometheus_client import Counter
from vllm.config import VllmConfig

from deqseq.solution import Solution
from deqseq.status import Status

_COUNTERS = {
    "deqseq:steps": "Steps in which tokens were solved.",
    "deqseq:evaluations": "Evaluations of f. Each covers all requests that have not left the step.",
    "deqseq:tokens": "Tokens that were evaluated, in prompts and in answers, converged or not.",
    "deqseq:token_evaluations": "Evaluations that tokens needed, summed over the tokens.",
    "deqseq:unconverged_tokens": "Tokens that used up their evaluations, or became non-finite.",
}


@cache
def _counter(name: str) -> Counter:
    """The counter ``name`` of this process. Prometheus appends ``_total`` to the name."""
    return Counter(name, _COUNTERS[name], labelnames=["model_name"])


class IterationCounters:
    """Counts the iterations of a model's steps. The label ``model_name`` is that of vLLM's own metrics."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        model = vllm_config.model_config.served_model_name
        self._counters = [_counter(name).labels(model) for name in _COUNTERS]

    def add(self, *solutions: Solution) -> None:
        """Count the solves of one step. The host waits for the device."""
        evaluations = sum(solution.nfe for solution in solutions)
        sums = torch.stack([_sums(solution) for solution in solutions]).sum(0).tolist()
        for counter, value in zip(self._counters, (1, evaluations, *sums), strict=True):
            counter.inc(value)


def _sums(solution: Solution) -> torch.Tensor:
    """(3,) int64: number of tokens, sum of their iterations, number of tokens that did not converge."""
    failed = (solution.status == Status.BUDGET_EXHAUSTED) | (solution.status == Status.NON_FINITE)
    tokens = failed | (solution.iterations > 0)  # false at padding
    return torch.stack([tokens.sum(), solution.iterations.sum(), failed.sum()])
