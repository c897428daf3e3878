"""Reads checkpoints, and turns weight-normalised weights into plain ones."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM

_LENGTH, _DIRECTION = ".parametrizations.weight.original0", ".parametrizations.weight.original1"


def checked(weights: Iterable[tuple[str, Tensor]], config: ImplicitConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of a checkpoint, and compare them with the model that ``config`` describes.

    Raises:
        ValueError: the model has no weight of this name, or one of another shape; at the end, a weight is
            missing.
    """
    with torch.device("meta"):
        model = ImplicitForCausalLM(config)
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    missing = set(expected) - set(model.all_tied_weights_keys)
    for name, weight in weights:
        if expected.get(name) != tuple(weight.shape):
            needed = expected.get(name, "no weight of this name")
            raise ValueError(
                f"the checkpoint does not fit its configuration: {name} has shape {tuple(weight.shape)}, and "
                f"the model needs {needed}"
            )
        missing.discard(name)
        yield name, weight
    if missing:
        raise ValueError(f"the checkpoint does not fit its configuration: it lacks {sorted(missing)[:5]}")


def folded(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of a checkpoint. A pair g, v becomes the weight g v / ||v||.

    Raises:
        ValueError: the checkpoint has only g or only v of a weight.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in weights:
        part = next((end for end in (_LENGTH, _DIRECTION) if name.endswith(end)), None)
        if part is None:
            yield name, value
            continue
        name = name.removesuffix(part)
        found = parts.setdefault(name, {})
        found[part] = value
        if len(found) == 2:
            yield f"{name}.weight", torch._weight_norm(found[_DIRECTION], found[_LENGTH], 0)
            del parts[name]
    if parts:
        raise ValueError(f"the checkpoint has only one half of weight-normalised weights: {sorted(parts)}")
