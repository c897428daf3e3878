"""Figures of evaluation reports. Each function draws one report.

The argument ``axes`` has the panels of the figure, from top to bottom.
"""

from collections.abc import Sequence
from typing import Any

from deqseq.tasks.common.figures import log_scale
from deqseq.tasks.evaluate.downstream import TaskScore
from deqseq.tasks.evaluate.duality import Agreement
from deqseq.tasks.evaluate.perplexity import Score, exponential

# Draw a mean only if it is over at least this many tokens. Other means are too noisy.
_ENOUGH = 30


def positions(axes: list[Any], scores: Sequence[Score]) -> None:
    """Draw perplexity by position for the first score. If there is a second panel, draw iterations there."""
    shown = [p for p in scores[0].by_position if p.tokens >= _ENOUGH]
    last = [p.last for p in shown]
    low, high = ([exponential(p.nll + s * (p.nll_stderr or 0)) for p in shown] for s in (-1, 1))
    axes[0].plot(last, [p.perplexity for p in shown], "o-")
    axes[0].fill_between(last, low, high, alpha=0.2, label="± standard error")
    axes[0].set_ylabel("perplexity")
    axes[0].legend()
    for axis in axes[1:]:
        axis.plot(last, [p.iterations for p in shown], "o-")
        axis.set_ylabel("iterations of a token")
    for axis in axes:
        _position_axis(axis)


def lengths(axes: list[Any], scores: Sequence[Score]) -> None:
    """Draw perplexity by sequence length, and in the second panel the change of the loss by position.

    The change is drawn for every length except the first. It is the loss of tokens at the other length, minus
    the loss of the same tokens at the first length.
    """
    axes[0].plot([s.length for s in scores], [s.perplexity for s in scores], "o-")
    axes[0].set(xlabel="length of the sequences", ylabel="perplexity")
    log_scale(axes[0].xaxis, 2)
    for s in scores[1:]:
        shown = [p for p in s.by_position if p.tokens >= _ENOUGH]
        last, change = [p.last for p in shown], [p.change or 0 for p in shown]
        error = [p.change_stderr or 0 for p in shown]
        (line,) = axes[1].plot(last, change, "o-", label=f"length {s.length}, ± standard error")
        low, high = ([c + sign * e for c, e in zip(change, error, strict=True)] for sign in (-1, 1))
        axes[1].fill_between(last, low, high, alpha=0.2, color=line.get_color())
    axes[1].axhline(0, color="grey", linestyle="--", label=f"the same tokens at length {scores[0].length}")
    axes[1].set_ylabel("change of the loss, nats")
    axes[1].legend()
    _position_axis(axes[1])


def budgets(axes: list[Any], scores: Sequence[Score]) -> None:
    """Draw perplexity and residual against the mean number of iterations.

    The last of ``scores`` is from the model's own convergence policy. It is drawn as a star.
    """
    *limited, own = scores
    for axis, measure in zip(axes, ("perplexity", "residual"), strict=True):
        axis.plot([s.iterations for s in limited], [getattr(s, measure) for s in limited], "o-")
        axis.plot(own.iterations, getattr(own, measure), "*", ms=14, label="the model's own policy")
        log_scale(axis.xaxis, 2)
        log_scale(axis.yaxis)
    axes[0].set_ylabel("perplexity")
    axes[0].legend()
    axes[1].set(ylabel="relative residual, mean", xlabel="iterations of a token, mean")


def windows(axes: list[Any], found: Sequence[Agreement]) -> None:
    """Draw for each window its difference from the first window, and the mean iterations per token."""
    names = [str(a.window) for a in found]
    place = range(len(found))
    # Draw no point for a window without differences, because a logarithmic axis cannot show zero.
    axes[0].plot(place, [a.kl or None for a in found], "o-", label="KL divergence, mean, nats")
    different = [1 - a.agreement or None for a in found]
    axes[0].plot(place, different, "s--", label="share of other most likely tokens")
    log_scale(axes[0].yaxis)
    axes[0].set_ylabel(f"difference from window {names[0]}")
    axes[0].legend()
    axes[1].plot(place, [a.iterations for a in found], "o-")
    axes[1].set(ylabel="iterations of a token, mean", xlabel="window")
    axes[1].set_ylim(bottom=0)
    for axis in axes:
        axis.set_xticks(place, names)
        axis.set_xlim(-0.5, len(found) - 0.5)


def tasks(axes: list[Any], scores: Sequence[TaskScore]) -> None:
    """For each task, draw the main metric with its standard error, and the chance level."""
    place = range(len(scores))
    error = [s.main_stderr or 0.0 for s in scores]
    axes[0].bar(place, [s.main for s in scores], yerr=error, capsize=3)
    left, right = ([i + side for i in place] for side in (-0.45, 0.45))
    axes[0].hlines([s.chance for s in scores], left, right, "black", "--", label="chance")
    axes[0].set_xticks(place, [f"{s.task}\n{s.metric}" for s in scores], fontsize="x-small")
    axes[0].set(ylabel="accuracy, ± standard error", ylim=(0, 1))
    axes[0].legend()


def _position_axis(axis: Any) -> None:
    axis.set_xlabel("position in the sequence, up to")
    log_scale(axis.xaxis, 2)
