"""Breadth: solve every sequence from several starts.

:func:`solve_many` solves every sequence from all starts and keeps the best solution.
:func:`solve_with_restarts` tries one start after the other until the sequence converges.

A search can fail from one start and succeed from another. If f has several fixed points, different starts can
also lead to different fixed points.

Shapes: B sequences, L tokens, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deqseq.checks import check_count, check_instance
from deqseq.guess import Guess, propose
from deqseq.inputs import check_tokens, real_tokens
from deqseq.layer import ImplicitSequenceLayer
from deqseq.outputs import LayerOutput
from deqseq.policy import FixedIterations
from deqseq.problem import SolveOptions
from deqseq.solution import PER_TOKEN, Solution
from deqseq.status import Status


def solve_starts(
    layer: ImplicitSequenceLayer,
    x: Tensor,
    starts: int,
    *,
    attention_mask: Tensor | None = None,
    chunk: int | None = None,
    solve: SolveOptions | None = None,
) -> Iterator[LayerOutput]:
    """Solve ``x`` from the starts 0, 1, ..., ``starts - 1``, and yield their outputs in this order.

    The guess of the solve options proposes the initial iterate of each start. A call ``layer(x)`` uses
    start 0. Gradients flow as in a call of the layer. If you need no gradients, call this function and
    iterate over its outputs under ``torch.no_grad()``.

    Args:
        layer: a layer in evaluation mode.
        x: (B, L, D) input.
        starts: number of starts.
        attention_mask: (B, L), 1 or true for real tokens, 0 or false for padding. Padding may be anywhere.
        chunk: maximum number of sequences in a batch. Every start adds B sequences. ``None``: all starts are
            in one batch. ``chunk`` changes results only by rounding.
        solve: solve options; by default ``layer.eval_solve``.

    Returns:
        One output per start, like the output of ``layer(x)``. ``solution.nfe`` counts the evaluations of all
        batches that contained sequences of this start.

    Raises:
        ValueError: the layer is in training mode; there are several starts, and the guess does not vary;
            ``starts`` or ``chunk`` is below 1; the layer rejects the inputs.
    """
    options = _check(layer, x, starts, attention_mask, chunk, solve)
    return (out for out, _ in _solved(layer, x, starts, attention_mask, chunk, options))


def solve_many(
    layer: ImplicitSequenceLayer,
    x: Tensor,
    starts: int,
    *,
    attention_mask: Tensor | None = None,
    chunk: int | None = None,
    solve: SolveOptions | None = None,
) -> LayerOutput:
    """Solve ``x`` from several starts, and keep for each sequence the start with the smallest residual.

    The residual of a sequence is the root mean square of the relative residuals of its real tokens. A start
    with a non-finite token counts as the worst. If starts have equal residuals, the first is kept. Without
    gradients, memory holds only the best solutions so far and the solutions of the current start and chunk.

    Args:
        layer, x, starts, attention_mask, chunk, solve: as in :func:`solve_starts`.

    Returns:
        One output. For each sequence, z (B, L, D) and ``solution`` are those of the kept start.
        ``solution.nfe`` counts the evaluations of all batches.

    Raises:
        ValueError: as in :func:`solve_starts`.

    Example::

        layer = ImplicitSequenceLayer(backbone, guess="noise").eval()
        with torch.no_grad():
            out = solve_many(layer, x, starts=16, chunk=64)
    """
    options = _check(layer, x, starts, attention_mask, chunk, solve)
    outputs = _solved(layer, x, starts, attention_mask, chunk, options)
    out, evaluations = next(outputs)
    best = _solution(out)
    least = _residual(best, attention_mask)
    for out, total in outputs:
        found, evaluations = _solution(out), total
        residual = _residual(found, attention_mask)
        better = residual < least
        least = torch.where(better, residual, least)
        values: dict[str, Any] = {name: _where(better, found, best, name) for name in PER_TOKEN}
        best = replace(best, **values)
    best.nfe = evaluations
    return LayerOutput(best.z, None, best)


def solve_with_restarts(
    layer: ImplicitSequenceLayer,
    x: Tensor,
    starts: int,
    *,
    attention_mask: Tensor | None = None,
    solve: SolveOptions | None = None,
) -> LayerOutput:
    """Solve ``x`` from start 0. Then solve the sequences that have not converged from start 1, and so on.

    A sequence has converged when all its tokens have, also with :class:`~deqseq.Quantile`. A sequence with a
    non-finite input is solved from start 0 only. If no start of a sequence converges, the start with the
    smallest residual is kept, as in :func:`solve_many`. If most sequences converge from start 0, this costs
    much less than :func:`solve_many`. A convergence policy with a small ``max_iter``, such as 64, restarts
    early.

    Args:
        layer, x, attention_mask, solve: as in :func:`solve_starts`.
        starts: maximum number of starts for each sequence.

    Returns:
        One output. For each sequence, z (B, L, D) and ``solution`` are those of the kept start, except that
        ``solution.iterations`` counts the evaluations of all its starts. ``solution.nfe`` counts the
        evaluations of all batches.

    Raises:
        ValueError: as in :func:`solve_starts`; the policy is ``FixedIterations``, which has no tolerance; the
            layer has a process group, and ``starts`` is above 1.

    Example::

        layer = ImplicitSequenceLayer(backbone, guess="noise", convergence=Residual(rtol=1e-3)).eval()
        with torch.no_grad():
            out = solve_with_restarts(layer, x, starts=16)
    """
    options = _check(layer, x, starts, attention_mask, None, solve)
    if isinstance(options.convergence, FixedIterations):
        raise ValueError(
            f"restarts need a policy with a tolerance, got {options.convergence}: use solve_many"
        )
    if starts > 1 and layer.group is not None:
        raise ValueError("processes of a group would need different numbers of restarts: use solve_many")
    best = _solve_start(layer, x, attention_mask, options, 0)
    least = _residual(best, attention_mask)
    finite = torch.isfinite(x).all(-1)
    finite = finite if attention_mask is None else finite | ~real_tokens(attention_mask)
    solvable = finite.all(1)
    for number in range(1, starts):
        rows = (solvable & (best.status != Status.CONVERGED).any(1)).nonzero()[:, 0]
        if not len(rows):
            break
        mask = None if attention_mask is None else attention_mask[rows]
        found = _solve_start(layer, x[rows], mask, options, number)
        residual = _residual(found, mask)
        better = (found.status == Status.CONVERGED).all(1) | (residual < least[rows])
        iterations = best.iterations.index_add(0, rows, found.iterations)
        rows, found, residual = rows[better], found[better], residual[better]
        least = least.index_copy(0, rows, residual)
        values = {n: getattr(best, n).index_copy(0, rows, getattr(found, n)) for n in PER_TOKEN}
        best = replace(best, **{**values, "iterations": iterations, "nfe": best.nfe + found.nfe})
    return LayerOutput(best.z, None, best)


def _solve_start(
    layer: ImplicitSequenceLayer, x: Tensor, mask: Tensor | None, options: SolveOptions, number: int
) -> Solution:
    """Solve all sequences of ``x`` from start ``number``."""
    guess = _Starts(options.guess, [number], [len(x)])
    return _solution(layer(x, mask, solve=replace(options, guess=guess)))


def _check(
    layer: ImplicitSequenceLayer,
    x: Tensor,
    starts: int,
    attention_mask: Tensor | None,
    chunk: int | None,
    solve: SolveOptions | None,
) -> SolveOptions:
    """Check the arguments of the public functions. Returns the solve options."""
    if not isinstance(layer, ImplicitSequenceLayer):
        raise ValueError(f"several starts are for implicit layers, got {type(layer).__name__}")
    options = layer.eval_solve if solve is None else solve
    check_instance("solve", options, SolveOptions, "SolveOptions")
    if layer.training:
        raise ValueError("several starts are for evaluation: call layer.eval() first")
    check_count("starts", starts)
    if chunk is not None:
        check_count("chunk", chunk)
    if starts > 1 and not options.guess.varies:
        raise ValueError(
            f"the guess {options.guess} is the same for every start: use one that varies, such as 'noise'"
        )
    check_tokens(x, layer.backbone.d_model, attention_mask=attention_mask)
    return options


def _solved(
    layer: ImplicitSequenceLayer,
    x: Tensor,
    starts: int,
    attention_mask: Tensor | None,
    chunk: int | None,
    options: SolveOptions,
) -> Iterator[tuple[LayerOutput, int]]:
    """Solve all pairs (start, sequence) in batches of ``chunk`` pairs. The caller checks the arguments.

    Yields the output of each start, and the evaluations of all batches so far.
    """
    batch, total, parts = x.shape[0], 0, list[Solution]()
    chunk = chunk or starts * batch
    for first in range(0, starts * batch, chunk):
        pairs = range(first, min(first + chunk, starts * batch))
        rows = torch.arange(pairs.start, pairs.stop, device=x.device) % batch
        # The starts in this batch, and the number of sequences that each of them has in the batch.
        numbers = range(first // batch, pairs[-1] // batch + 1)
        counts = [min(pairs.stop, (n + 1) * batch) - max(first, n * batch) for n in numbers]
        mask = None if attention_mask is None else attention_mask[rows]
        guess = _Starts(options.guess, numbers, counts)
        found = _solution(layer(x[rows], mask, solve=replace(options, guess=guess)))
        total += found.nfe
        end = 0
        for number, count in zip(numbers, counts, strict=True):
            parts.append(found[end : end + count])
            end += count
            if (first + end) == (number + 1) * batch:  # these were the last sequences of this start
                whole = _joined(parts)
                parts.clear()
                yield LayerOutput(whole.z, None, whole), total


class _Starts(Guess):
    """The guess for a batch with several starts, one after the other.

    First come ``counts[0]`` sequences of start ``numbers[0]``, then ``counts[1]`` of start ``numbers[1]``,
    and so on.
    """

    def __init__(self, guess: Guess, numbers: Sequence[int], counts: Sequence[int]) -> None:
        self._guess, self._numbers, self._counts = guess, numbers, counts

    def propose(self, x: Tensor, number: int | None, previous: Tensor | None) -> Tensor:
        proposals = []
        for part, own in zip(x.split(list(self._counts)), self._numbers, strict=True):
            proposed = propose(self._guess, part, own, previous)
            proposals.append(torch.zeros_like(part) if proposed is None else proposed.to(x.dtype))
        return torch.cat(proposals)


def _solution(out: LayerOutput) -> Solution:
    assert out.solution is not None  # an implicit layer always returns a solution
    return out.solution


def _joined(parts: Sequence[Solution]) -> Solution:
    """Join the solutions ``parts`` into one solution with all their sequences, in order."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {n: torch.cat([getattr(part, n) for part in parts]) for n in PER_TOKEN}
    return replace(parts[0], **values, nfe=sum(part.nfe for part in parts))


def _residual(solution: Solution, attention_mask: Tensor | None) -> Tensor:
    """(B,) root mean square residual of each sequence's real tokens; infinite if a token is not finite."""
    residual = solution.residual
    real = torch.ones_like(residual, dtype=torch.bool)
    real = real if attention_mask is None else real_tokens(attention_mask)
    finite = torch.isfinite(solution.z.detach()).all(-1) & torch.isfinite(residual)
    mean = residual.square().where(real, 0.0).sum(1) / real.sum(1).clamp_min(1)
    return mean.sqrt().where((finite | ~real).all(1), torch.inf)


def _where(better: Tensor, found: Solution, best: Solution, name: str) -> Tensor:
    """The tensor ``name``: of ``found`` where ``better`` (B,) is true, of ``best`` for other sequences."""
    value: Tensor = getattr(found, name)
    return torch.where(better.view(-1, *[1] * (value.dim() - 1)), value, getattr(best, name))
