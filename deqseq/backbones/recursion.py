"""The recursion backbone: one map updates two latents in turn. z holds both latents.

Shapes: B sequences, L tokens, D width of a latent.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deqseq.backbone import Backbone, Context, State, Trace, backbones
from deqseq.checks import check_count, check_damping, check_not_negative
from deqseq.solvers.picard import damped


class RecursionBackbone(Backbone):
    """f(z, x): one round of updates of two latents, z = [z_H, z_L], with x = [x_H, x_L].

    Sources: Hierarchical Reasoning Models, Wang et al., 2025, arXiv 2506.21734; Tiny Recursive Models,
    Jolicoeur-Martineau, 2025, arXiv 2510.04871; Equilibrium Reasoners, arXiv 2605.21488.

    z and x have width 2 D: each holds two halves of width D. A round first does, ``updates`` times,

        z_L <- (1 - damping) z_L + damping map(z_L + z_H + x_L),

    and then, once,

        z_H <- (1 - damping) z_H + damping map(z_H + z_L + x_H).

    This damping is part of f. A solver can have a damping of its own, which mixes f(z) with z.

    :meth:`compile` compiles a whole round with :func:`torch.compile`. With ``mode="reduce-overhead"``, rounds
    on a GPU are CUDA graphs: the host launches one graph instead of hundreds of kernels. Every batch size
    needs a graph of its own. :meth:`evaluate` copies the results of compiled rounds, because the next replay
    of a graph overwrites them. A direct call does not copy. A copy of a compiled backbone is not compiled.

    The explicit twin, a model without a search, is an :class:`~deqseq.ExplicitSequenceLayer` of width D with
    ``map`` alone.

    Args:
        map: a backbone of width D without injection, as an object or as a mapping such as
            ``{"name": "mixer", ...}``. In a mapping, ``injection`` is false by default. The recursion is
            causal if ``map`` is causal.
        updates: number of updates of z_L in a round.
        damping: in (0, 1]; with 1, the new latent is the map's output.
        noise: standard deviation of the Gaussian noise that every update adds to its latent in training mode.
            In training mode, the residual of a search then stays above about this size.

    Raises:
        ValueError: ``map`` has an injection or no width, or a number is out of range.
    """

    def __init__(
        self, map: Backbone | Mapping[str, Any], updates: int = 6, damping: float = 0.95, noise: float = 0.0
    ) -> None:
        super().__init__()
        check_count("updates", updates)
        check_damping(damping)
        check_not_negative("noise", noise)
        if isinstance(map, Mapping) and backbones.takes(map, "injection"):
            map = {"injection": False, **map}
        self.map = backbones.create(map)
        if self.map.injects:
            raise ValueError(
                "a recursion adds x to the latents, so its map must have injection=False, got "
                f"{type(self.map).__name__} with injection"
            )
        if self.map.d_model is None:
            raise ValueError(f"a recursion needs a map with a width d_model, got {type(self.map).__name__}")
        self.d_model = 2 * self.map.d_model
        self.causal = self.map.causal
        self.updates = updates
        self.damping = damping
        self.noise = noise

    def prepare(self, x: Tensor, position_ids: Tensor | None = None) -> Context:
        return _with_input(x, self.map.prepare(x.chunk(2, -1)[0], position_ids))

    def hide_padding(self, context: Context, lengths: Tensor) -> Context:
        x, inner = _input_and_rest(context)
        return _with_input(x, self.map.hide_padding(inner, lengths))

    def evaluate(self, z: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, Trace]:
        found: Tensor = self(z, context)  # call self, not forward(): compile() compiles only __call__
        # If the compiled round is a CUDA graph, the next evaluation overwrites its result. So copy it.
        return found if self._compiled_call_impl is None else found.clone(), None

    def forward(self, z: Tensor, context: Context, state: State | None = None) -> Tensor:
        """f(z), (B, L, 2 D): one round."""
        x, inner = _input_and_rest(context)
        (high, low), (x_high, x_low) = z.chunk(2, -1), x.chunk(2, -1)
        for _ in range(self.updates):
            low = self._updated(low, high + x_low, inner)
        high = self._updated(high, low + x_high, inner)
        return torch.cat([high, low], -1)

    def _updated(self, latent: Tensor, others: Tensor, context: Context) -> Tensor:
        """The latent (B, L, D) after one update. ``others``: the sum of the other latent and the input."""
        new = damped(latent, self.map(latent + others, context).to(latent.dtype), self.damping)
        return new + self.noise * torch.randn_like(new) if self.training and self.noise else new

    def extra_repr(self) -> str:
        return f"updates={self.updates}, damping={self.damping}, noise={self.noise}"


def _with_input(x: Tensor, inner: Context) -> Context:
    """The recursion's context: the map's context ``inner``, with x as its first token tensor."""
    return replace(inner, tokens=(x, *inner.tokens))


def _input_and_rest(context: Context) -> tuple[Tensor, Context]:
    """Split a recursion's context into x and the map's context. Undoes :func:`_with_input`."""
    return context.tokens[0], replace(context, tokens=context.tokens[1:])
