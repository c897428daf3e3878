"""Reads the weights of linear maps, convolutions and norms, with normalisation and adapters applied.

PEFT replaces a linear map by an adapter, and the adapter acts only when it is called. bitsandbytes replaces a
linear map by a quantised map, and torchao replaces its weight. Backbones read weights and never call linear
maps. So this module computes the weight of a linear map, dequantised and including its adapters. It
recognises the classes of these packages by names and attributes, and does not need the packages.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from deqseq import kernels

Weights = TypeVar("Weights")
_kept: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept weights", default=None)


@contextmanager
def keep_weights() -> Iterator[None]:
    """Context in which backbones compute their effective weights once, and keep them for later calls.

    It applies to the current thread, and to calls without gradients. A changed parameter makes the weights
    be computed again, but not a change through ``parameter.data``, which PyTorch does not record.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def kept(owner: nn.Module, x: Tensor, compute: Callable[[], Weights]) -> Weights:
    """``compute()``, the weights of ``owner`` for the input ``x``. In :func:`keep_weights`, only once.

    Weights with adapters are computed in every call, because adapters can be switched. A CUDA graph that is
    being recorded computes the weights itself, because it outlives the kept weights.
    """
    if torch.compiler.is_compiling() or (found := _kept.get()) is None or torch.is_grad_enabled():
        return compute()
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return compute()
    key = owner, x.dtype, x.device, kernels.autocast_dtype(x)
    weights, versions = found.get(key, (None, None))
    if versions is None or any(parameter._version != version for parameter, version in versions):
        weights = compute()
        if not any(is_adapter(module) for module in owner.modules()):
            versions = [(p, p._version) for p in owner.parameters() if not p.is_inference()]
            found[key] = weights, versions
    return cast(Weights, weights)


def effective_weight(module: nn.Module) -> Tensor:
    """The weight of a linear map or convolution, with normalisation and all active adapters applied.

    A quantised weight is dequantised.

    Raises:
        ValueError: ``module`` is not a linear map, a convolution or a supported adapter; the adapter has
            dropout in training, adapts a convolution, or was merged into a weight-normalised map; the
            quantisation also quantises inputs, or has not happened yet; accelerate has moved the weight away.
    """
    _check_loaded(module)
    _run_weight_hooks(module)
    plain = type_before_parametrizations(module) in (nn.Linear, nn.Conv1d)
    if plain or _name(module).startswith("bitsandbytes.Linear"):
        return _dequantised(module)
    if "modules_to_save" in module._modules:
        return effective_weight(_active(module, "modules_to_save"))
    if is_adapter(module):
        return _adapted(module)
    raise ValueError(
        f"{_name(module)} cannot replace a linear map, because backbones read weights and do not call "
        "modules: use an nn.Linear, quantise it with torchao or bitsandbytes, or put a LoRA adapter around it"
    )


def projection(linear: nn.Module, x: Tensor) -> Tensor:
    """The weight from :func:`effective_weight`, in the dtype in which autocast computes linear maps of ``x``.

    Without autocast, this is the dtype of ``x``. Dequantised weights may have another dtype: PEFT's
    ``prepare_model_for_kbit_training`` converts all weights except quantised ones to float32.
    """
    return effective_weight(linear).to(kernels.autocast_dtype(x))


def active_norm(module: nn.Module) -> nn.RMSNorm:
    """Returns ``module`` itself if it is a norm. If it is an adapter, returns the adapter's active norm.

    PEFT's LN tuning and ``modules_to_save`` are supported.

    Raises:
        ValueError: ``module`` is another kind of norm or adapter, or has several active norms.
    """
    if type(module) is nn.RMSNorm or not is_adapter(module):
        patched = "forward" in vars(module) and "_hf_hook" not in vars(module)
        if patched or type(module).forward is not nn.RMSNorm.forward:
            raise ValueError(
                f"this {_name(module)} has a forward method of its own, which backbones do not call: they "
                "compute torch.nn.RMSNorm themselves"
            )
        _check_loaded(module)
        _run_weight_hooks(module)
        return cast(nn.RMSNorm, module)
    for choices in ("ln_tuning_layers", "modules_to_save"):
        if choices in module._modules:
            return active_norm(_active(module, choices))
    raise ValueError(f"{_name(module)} cannot adapt a norm: use LN tuning, or modules_to_save")


def is_quantised(module: nn.Module | None) -> bool:
    """Whether ``module`` is a linear map that bitsandbytes or torchao has quantised."""
    kind = type(None if module is None else module._parameters.get("weight"))
    # torch.compile of torch 2.11 cannot read the modules of these two classes.
    if kind in (type(None), nn.Parameter):
        return False
    return kind.__module__.partition(".")[0] in ("bitsandbytes", "torchao")


def _dequantised(module: nn.Module) -> Tensor:
    """The weight of a linear map or convolution, dequantised if it is quantised."""
    weight: Any = module.weight
    if not is_quantised(module):
        return cast(Tensor, weight)
    if type(weight).__module__.startswith("torchao"):
        if getattr(weight, "act_quant_kwargs", None) is not None:
            raise ValueError(
                f"{type(weight).__name__} quantises inputs of linear maps too, but backbones read weights "
                "and have no such inputs: quantise weights only, such as with Int8WeightOnlyConfig"
            )
        return cast(Tensor, weight.dequantize())
    from bitsandbytes import functional

    plain: Tensor
    if type(weight).__name__ == "Params4bit":
        if weight.quant_state is None:
            raise ValueError(f"this {_name(module)} is not quantised yet: move the model to its device")
        plain = functional.dequantize_4bit(weight.data, weight.quant_state)
        return plain
    state: Any = module.state
    scale = state.SCB if weight.SCB is None else weight.SCB
    if state.has_fp16_weights or scale is None:
        raise ValueError(
            f"this {_name(module)} is not quantised yet: set has_fp16_weights=False, and move the model to "
            "its device"
        )
    plain = functional.int8_vectorwise_dequant(weight.data, scale)
    return plain


def _check_loaded(module: nn.Module) -> None:
    """Raise ``ValueError`` if accelerate has moved the weights away. It loads them when a call needs them."""
    if "_hf_hook" in vars(module) and any(p.is_meta for p in module.parameters()):
        raise ValueError(
            f"accelerate has moved the weights of this {_name(module)} away from its device: the layer must "
            "be on one device, because every iteration reads all its weights"
        )


def _run_weight_hooks(module: nn.Module) -> None:
    """Recompute the weight if ``torch.nn.utils`` changes it: ``spectral_norm``, ``weight_norm`` or ``prune``.

    Their hooks compute the weight when the module is called, but backbones do not call modules.
    """
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm | WeightNorm | BasePruningMethod):
            hook(module, ())


def is_adapter(module: nn.Module | None) -> bool:
    """Whether ``module`` wraps another module, as PEFT's adapters do."""
    return module is not None and ("base_layer" in module._modules or "original_module" in module._modules)


def check_merged(module: nn.Module) -> None:
    """Raise ``ValueError`` if an adapter was merged into a weight-normalised map.

    Such a merge has no effect on the weight.
    """
    adapter: Any = module
    if is_adapter(module) and getattr(module, "merged", False) and is_parametrized(adapter.base_layer):
        raise ValueError(
            f"merging {_name(module)} into a weight-normalised map had no effect: call "
            "deqseq.backbones.fold_weight_norm(model), then merge again"
        )


class LinearMaps(nn.Module):
    """Base class of modules that contain linear maps. It checks adapters when PEFT unloads them.

    Raises:
        ValueError: PEFT unloads an adapter after merging it into a weight-normalised map. The merge had no
            effect, so the adapter would be lost.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        adapter = vars(self).get("_modules", {}).get(name)
        if adapter is not None and adapter._modules.get("base_layer") is value:  # PEFT unloads an adapter
            check_merged(adapter)
        super().__setattr__(name, value)


def _active(module: nn.Module, choices: str) -> nn.Module:
    """The module that an adapter currently uses: the original module, or one of its replacements.

    ``choices`` is the name of the submodule that holds the replacements. The original module is used if the
    adapter is disabled or merged, or if it has no replacement for an active name.
    """
    adapter: Any = module
    _unmerge_if_disabled(adapter)
    names, others = list(adapter.active_adapters), adapter._modules[choices]
    original = adapter._modules.get("base_layer") or adapter._modules["original_module"]
    unused = adapter.disable_adapters or getattr(adapter, "merged", False) or not names
    if unused or any(name not in others for name in names):
        return cast(nn.Module, original)
    if len(names) > 1:
        raise ValueError(f"{_name(module)} needs one active adapter, got {names}: call set_adapter(name)")
    return cast(nn.Module, others[names[0]])


def _adapted(module: nn.Module) -> Tensor:
    """The weight of the linear map inside the adapter ``module``, with all active adapters applied."""
    adapter: Any = module
    base = adapter.base_layer
    if isinstance(base, nn.Conv1d):
        raise ValueError(
            f"{_name(module)} adapts a {_name(base)}, but backbones support adapters of linear maps only: "
            "leave conv1d out of target_modules"
        )
    check_merged(adapter)
    _unmerge_if_disabled(adapter)
    original = effective_weight(base)
    if adapter.disable_adapters or adapter.merged:
        return original
    if adapter._forward_pre_hooks or ("forward" in vars(adapter) and not hasattr(adapter, "_hf_hook")):
        raise ValueError(
            f"a hook changes what {_name(module)} computes (adapter_names=, X-LoRA), which has no effect: "
            "backbones read weights and do not call modules; select adapters with set_adapter"
        )
    weight = original
    with torch.autocast(weight.device.type, enabled=False):
        for name in adapter.active_adapters:
            weight = _with_adapter(weight, original, adapter, name)
    return weight


def _unmerge_if_disabled(adapter: Any) -> None:
    """Unmerge the adapter if it is disabled.

    PEFT would unmerge it in the adapter's ``forward``, but backbones do not call ``forward``.
    """
    if adapter.disable_adapters and getattr(adapter, "merged", False):
        adapter.unmerge()


def _with_adapter(weight: Tensor, original: Tensor, adapter: Any, name: str) -> Tensor:
    """Apply the adapter ``name`` to ``weight`` (out, in). Supports LoRA, rsLoRA, AdaLoRA, DoRA and IA3.

    ``original`` is the weight without any adapter. DoRA needs it to compute its norm.
    """
    if hasattr(adapter, "ia3_l"):
        return weight * adapter.ia3_l[name] if name in adapter.ia3_l else weight
    if not (hasattr(adapter, "lora_A") and hasattr(adapter, "get_delta_weight")):
        raise ValueError(
            f"backbones read weights and do not call modules, so {_name(adapter)} would have no effect: use "
            "LoRA, DoRA or IA3, or call deqseq.backbones.fold_weight_norm(model) and merge the adapter"
        )
    if name not in adapter.lora_A:
        return weight
    dropout = getattr(adapter, "lora_dropout", {})
    if name in dropout and dropout[name].training and getattr(dropout[name], "p", 0) > 0:
        raise ValueError(
            f"adapter {name!r} drops inputs of linear maps, but backbones read weights and have no such "
            f"inputs: set lora_dropout=0, got {dropout[name].p}"
        )
    if getattr(adapter, "lora_bias", {}).get(name):
        raise ValueError(f"adapter {name!r} adds a bias to a linear map without bias: set lora_bias=False")
    variant = getattr(adapter, "lora_variant", {}).get(name)
    if variant is not None and not type(variant).__name__.startswith("Dora"):
        raise ValueError(f"adapter {name!r} must be LoRA, rsLoRA or DoRA, got a {type(variant).__name__}")
    delta: Tensor = adapter.get_delta_weight(name)
    if variant is None:
        return weight + delta
    magnitude = adapter.lora_magnitude_vector[name]
    with torch.no_grad():  # DoRA treats the norm as a constant
        norm = magnitude.get_weight_norm(original, delta, scaling=1)
    return cast(Tensor, (magnitude.weight / norm)[:, None] * (weight + delta))


def _name(module: nn.Module) -> str:
    """The name of a module's class, with its package, such as ``peft.Linear``."""
    kind = type_before_parametrizations(module)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
