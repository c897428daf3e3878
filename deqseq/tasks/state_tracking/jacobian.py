"""Numerical check of Theorem 1, on the Jacobian of a Mamba2 layer's state from one token to the next.

At token t, the layer has the input x_t, the equilibrium z_t and the state h_t. The state is updated by

    h_t = Λ(z_t, x_t) h_{t-1} + u(z_t, x_t),    with a diagonal Λ.

The check computes the Jacobian J = dh_t/dh_{t-1}. In an explicit layer, z_t does not depend on h_{t-1}, so
J = diag(Λ). In an implicit layer, z_t = f(z_t, h_{t-1}, x_t) depends on h_{t-1}, so

    J = diag(Λ) + (∂Λ/∂z · dz/dh) h + ∂u/∂z · dz/dh,    dz/dh = (I − ∂f/∂z)⁻¹ ∂f/∂h

(Schöne et al., *Implicit Language Models are RNNs*, ICML 2025, arXiv 2502.07827.)

h is the state of the recurrence. The convolution also has a state: the inputs of the last tokens. The check
keeps the state of the convolution constant.

Shapes: L tokens, D width, S entries of the flattened state h.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deqseq import ExplicitSequenceLayer, ImplicitSequenceLayer, Residual, SolveOptions
from deqseq.backbone import State
from deqseq.backbones import Mamba2Backbone
from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.solvers import Broyden
from deqseq.status import Status
from deqseq.tasks.common.command_line import check_folder
from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import Column, column, provenance, table
from deqseq.tasks.common.runs import names_of
from deqseq.tasks.state_tracking.evaluate import held_out, load

Layer = ImplicitSequenceLayer | ExplicitSequenceLayer

TOLERANCE = 1e-13
MAX_ENTRIES = 2048
_STEP = 1e-3  # step of the central differences, relative to the largest entry of h
# Solve one token at a time, to a tight tolerance. Broyden's method converges fast near the equilibrium, even
# if f is not a contraction.
_EXACTLY = SolveOptions(Broyden(memory=64), Residual(rtol=TOLERANCE, max_iter=1000), window=1)


@dataclass
class Jacobian:
    """A summary of the Jacobian J = dh_t/dh_{t-1} of a model's state h at one token.

    Attributes:
        token: number of the token in its sequence, counted from 1.
        entries: number of entries of the state, S.
        diagonal: largest absolute value on the diagonal of J.
        off_diagonal: largest absolute value off the diagonal of J.
        off_diagonal_mass: sum of ``|J|`` off the diagonal, divided by the sum of ``|J|``.
        disagreement: largest absolute difference between :func:`by_formula` and :func:`by_differences`,
            divided by the largest entry of ``|J|``.
    """

    model: str
    token: int
    entries: int
    diagonal: float
    off_diagonal: float
    off_diagonal_mass: float
    disagreement: float


_COLUMNS: tuple[Column, ...] = (
    column("model"), column("token"), column("entries"), column("diagonal", ".2e"),
    column("off_diagonal", ".2e"), column("off_diagonal_mass", ".1e"), column("disagreement", ".1e"),
)  # fmt: skip


def by_formula(layer: Layer, x: Tensor, state: State) -> Tensor:
    """Compute the Jacobian J = dh_t/dh_{t-1} (S, S) by the formula of Theorem 1.

    Autograd computes the partial derivatives in the formula.

    Args:
        layer: a layer with one Mamba2 block, in float64.
        x: (1, 1, D), the input of one token.
        state: the state before this token.
    """
    backbone = layer.backbone
    tail, h = state.layers[0]
    context = backbone.prepare(x)

    def step(z: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
        before = State(state.seen, ((tail, flat.view_as(h)),))
        fz, trace = backbone.evaluate(z.view_as(x), context, before)
        after = backbone.advance(trace, before, torch.ones_like(state.seen))
        return fz.flatten(), after.layers[0][1].flatten()

    with torch.no_grad():
        z = _solve(layer, x, state).z if backbone.injects else x
    (f_z, f_h), (h_z, h_h) = torch.func.jacrev(step, argnums=(0, 1))(z.flatten(), h.flatten())
    if not backbone.injects:
        return h_h.detach()
    z_h = torch.linalg.solve(torch.eye(len(f_z), dtype=f_z.dtype) - f_z, f_h)
    return (h_h + h_z @ z_h).detach()


@torch.no_grad()
def by_differences(layer: Layer, x: Tensor, state: State) -> Tensor:
    """Compute the Jacobian J (S, S) by central differences.

    Changes each entry of the state a little, up and down, and solves the layer again. Takes the same
    arguments as :func:`by_formula`.
    """
    tail, h = state.layers[0]
    out = _solve(layer, x, state)
    size = _STEP * max(h.abs().max(), out.state.layers[0][1].abs().max())
    moves = torch.eye(h.numel(), dtype=h.dtype).view(-1, *h.shape[1:]) * size
    states = torch.cat([h + moves, h - moves])
    batch = len(states)
    changed = State(state.seen.expand(batch), ((tail.expand(batch, -1, -1), states),))
    found = _solve(layer, x.expand(batch, -1, -1), changed, out.z.expand(batch, -1, -1))
    ahead, behind = found.state.layers[0][1].flatten(1).chunk(2)
    return ((ahead - behind) / (2 * size)).T


def _solve(layer: Layer, x: Tensor, state: State, z0: Tensor | None = None) -> Any:
    """The layer's output for one token.

    Raises:
        ValueError: the solve does not reach ``TOLERANCE``.
    """
    if isinstance(layer, ExplicitSequenceLayer):
        return layer(x, state=state)
    out = layer(x, state=state, z0=z0, solve=_EXACTLY)
    if bool((out.solution.status != Status.CONVERGED).any()):
        worst = out.solution.residual.max().item()
        raise ValueError(
            f"the layer does not converge: residual {worst:.1e} after {out.solution.nfe} evaluations"
        )
    return out


def inspect(name: str, layer: Layer, x: Tensor) -> Iterator[tuple[Jacobian, Tensor]]:
    """For every token of ``x`` (1, L, D), yield a summary of the state's Jacobian, and the Jacobian (S, S).

    Raises:
        ValueError: the layer is not one Mamba2 block, its state is too large, or a solve does not converge.
    """
    backbone = layer.backbone
    blocks = len(backbone.layers) if isinstance(backbone, Mamba2Backbone) else 0
    if blocks != 1:
        raise ValueError(f"{name} must have one block of Mamba2, got {blocks}")
    layer.double().eval()
    state: Any = backbone.initial_state(1)
    entries = state.layers[0][1].numel()
    if entries > MAX_ENTRIES:
        raise ValueError(
            f"the state of {name} may have at most {MAX_ENTRIES} entries, got {entries}: train a model "
            "with a smaller d_model, expand or d_state"
        )
    for t in range(x.shape[1]):
        token = x[:, t : t + 1].double()
        found = by_formula(layer, token, state)
        other = by_differences(layer, token, state)
        off = (found - found.diag().diag()).abs()
        row = Jacobian(
            model=name, token=t + 1, entries=len(found), diagonal=found.diagonal().abs().max().item(),
            off_diagonal=off.max().item(), off_diagonal_mass=(off.sum() / found.abs().sum()).item(),
            disagreement=((found - other).abs().max() / found.abs().max()).item(),
        )  # fmt: skip
        yield row, found
        with torch.no_grad():
            state = _solve(layer, token, state).state


def cases(runs: Sequence[str | Path], length: int, seed: int) -> Iterator[tuple[str, Layer, Tensor]]:
    """Yield the name, the layer and the input (1, L, D) of every case.

    The first two cases are an explicit and an implicit layer of the size in the paper's check, with random
    weights and inputs. The other cases are the trained layers of ``runs`` on new word problems.

    The name of a trained layer ends with the name of its folder. If several folders have the same name, the
    layer's name ends with the whole path.

    Raises:
        ValueError: a folder holds no finished run, or holds the run of a baseline model.
    """
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"n_layer": 1, "d_state": 1, "expand": 1, "headdim": 64}
    explicit = ExplicitSequenceLayer(Mamba2Backbone(64, injection=False, **sizes))
    implicit = ImplicitSequenceLayer(Mamba2Backbone(64, **sizes))
    yield "explicit, random", explicit, torch.randn(1, length, 64)
    yield "implicit, random", implicit, torch.randn(1, length, 64)
    for label, folder in zip(names_of(runs), runs, strict=True):
        model, settings = load(folder)
        name = f"{settings.form}, {settings.group}, {label}"
        if settings.baseline:
            raise ValueError(f"{name} must have one block of Mamba2, got {settings.baseline}")
        assert isinstance(model, ImplicitForCausalLM)
        tokens = held_out(settings, length, 1, seed).tokens
        with torch.no_grad():
            x = model.get_input_embeddings()(tokens.to(model.device))
        yield name, model.model.layer.cpu(), x.cpu()


def check(runs: Sequence[Path], length: int, seed: int, output: Path) -> None:
    """Check Theorem 1 with random weights and with the weights of finished runs. Writes JSON and a figure.

    Raises:
        ValueError: the two Jacobians differ by more than 1e-6. :func:`cases` and :func:`inspect` may raise it
            too.
    """
    check_folder(output, "jacobian.json", "jacobian.png")
    rows, last = [], {}
    for name, layer, x in cases(runs, length, seed):
        found = list(inspect(name, layer, x))
        rows += [row for row, _ in found]
        last[name] = found[-1][1]
    print(table(_COLUMNS, rows))
    output.mkdir(parents=True, exist_ok=True)
    settings = {"runs": list(map(str, runs)), "length": length, "seed": seed, "tolerance": TOLERANCE}
    made = {"settings": settings, **provenance(torch.device("cpu"))}
    write_json(output / "jacobian.json", {**made, "rows": [asdict(row) for row in rows]})
    plot(rows, last, output / "jacobian.png")
    worst = max(row.disagreement for row in rows)
    if not worst <= 1e-6:
        raise ValueError(f"formula and finite differences must agree to 1e-6, they differ by {worst:.1e}")
    print(f"agreement to {worst:.0e}; wrote jacobian.json and jacobian.png in {output}")


def plot(rows: Sequence[Jacobian], last: Mapping[str, Tensor], path: Path) -> None:
    """Write a PNG: the Jacobian of each layer at the last token, and the off-diagonal mass by token."""

    def draw(axes: list[Any]) -> None:
        from matplotlib.colors import BoundaryNorm

        decades = BoundaryNorm([0, *(10.0**k for k in range(-6, 1))], 256)
        *images, mass = axes
        for axis, (name, jacobian) in zip(images, last.items(), strict=True):
            image = axis.imshow(jacobian.abs().numpy(), norm=decades, cmap="viridis", interpolation="nearest")
            axis.set(title=name, xlabel="entry of h before the token", xticks=[], yticks=[])
        images[0].set_ylabel("entry after it")
        mass.figure.colorbar(image, ax=images[-1], label="|J|", format="%.0e")
        for name in last:
            mine = [row for row in rows if row.model == name]
            mass.plot([row.token for row in mine], [row.off_diagonal_mass for row in mine], "o-", label=name)
        mass.set(title="mass beside the diagonal", xlabel="token", ylim=(-0.002, None))
        mass.legend()

    save_figure(path, draw, columns=len(last) + 1, size=(3 * (len(last) + 1), 3.1))
