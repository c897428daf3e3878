"""Replace the weight-normalised linear maps and convolutions of a model by plain ones."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from deqseq.backbones.blocks import Stack
from deqseq.backbones.weights import is_adapter
from deqseq.checks import check_instance

Module = TypeVar("Module", bound=nn.Module)


def fold_weight_norm(module: Module) -> Module:
    """Replace every weight-normalised linear map and convolution of a model by a plain one, in place.

    The plain weight equals the normalised weight, so results stay equal up to rounding.

    If ``module`` is a language model, its configuration changes to ``backbone["weight_norm"] = False``. So
    ``save_pretrained`` and ``from_pretrained`` keep the plain maps. Pass the whole language model: if you
    pass only its layer or its backbone, the configuration does not change.

    The plain weights are new parameters, so create optimisers after folding. Folding a second time changes
    nothing.

    Args:
        module: a model, a layer, or a backbone that takes the option ``weight_norm``.

    Returns:
        ``module``.

    Raises:
        ValueError: ``module`` is no module, or contains no backbone that takes the option ``weight_norm``.
    """
    check_instance("module", module, nn.Module, "a module")
    stacks = [part for part in module.modules() if isinstance(part, Stack)]
    if not stacks:
        raise ValueError(
            "fold_weight_norm takes a model, a layer or a backbone with the option weight_norm, such as "
            f"LlamaBackbone; this {type(module).__name__} contains no such backbone"
        )
    adapters: list[Any] = [part for part in module.modules() if is_adapter(part)]
    for adapter in adapters:
        if getattr(adapter, "merged", False) and _is_normalised(adapter.base_layer):
            adapter.unmerge()  # undo a merge that had no effect, so that the adapter is active again
    for linear in [part for stack in stacks for part in stack.modules() if _is_normalised(part)]:
        _fold(linear)
    replaced: dict[int, Any] = {}
    for part in module.modules():
        config = vars(part).get("config")
        backbone = getattr(config, "backbone", None)
        if isinstance(backbone, Mapping) and (plain := _without_weight_norm(backbone)) != backbone:
            if id(config) not in replaced:  # copy the configuration: other models may share it
                replaced[id(config)] = deepcopy(config)
                replaced[id(config)].backbone = plain
            part.config = replaced[id(config)]
    return module


def _is_normalised(module: nn.Module) -> bool:
    parametrizations: Any = getattr(module, "parametrizations", None)
    if not is_parametrized(module, "weight") or not isinstance(parametrizations["weight"][0], _WeightNorm):
        return False
    if len(parametrizations) > 1 or len(parametrizations["weight"]) > 1:
        raise ValueError(
            f"fold_weight_norm needs maps whose only parametrisation is weight normalisation, got {module}"
        )
    return True


def _fold(linear: Any) -> None:
    hooks = linear._load_state_dict_pre_hooks  # torch's weight_norm has added one, which cannot be pickled
    ours = [key for key, h in hooks.items() if getattr(h.hook, "__module__", "") == _WeightNorm.__module__]
    trains = linear.parametrizations["weight"].original1.requires_grad
    weight, bias = nn.Parameter(linear.weight.detach().clone(), requires_grad=trains), linear.bias
    # Restore the plain class here. torch's remove_parametrizations would also change the parametrised class,
    # and copies of the map share this class.
    linear.__class__ = type_before_parametrizations(linear)
    del linear.parametrizations, linear.bias  # register both again, in the order of plain maps
    for key in ours:
        del hooks[key]
    linear.register_parameter("weight", weight)
    linear.register_parameter("bias", bias)


def _without_weight_norm(backbone: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a backbone's configuration in which ``weight_norm`` is false.

    The recursion backbone contains another backbone, its ``map``. In this case, ``weight_norm`` becomes false
    in the configuration of the ``map``.
    """
    if isinstance(inner := backbone.get("map"), Mapping):
        return {**backbone, "map": _without_weight_norm(inner)}
    return {**backbone, "weight_norm": False}
