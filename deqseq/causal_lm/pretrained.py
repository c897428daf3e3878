"""Loading and saving of all models of this package."""

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deqseq.backbones import folding
from deqseq.backbones.weights import is_quantised
from deqseq.causal_lm import reference
from deqseq.causal_lm.configuration import ImplicitConfig
from deqseq.checks import check_flag


class ImplicitPreTrainedModel(PreTrainedModel):
    """Base class that loads and saves implicit and explicit models with any backbone."""

    config_class = ImplicitConfig
    config: ImplicitConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # Keep each layer on one device. accelerate moves weights between devices only when a module's forward is
    # called, but backbones read weights without calling forward.
    _no_split_modules = ["ImplicitSequenceLayer", "ExplicitSequenceLayer"]  # noqa: RUF012 - as in transformers

    def _init_weights(self, module: nn.Module) -> None:
        # Initialise only embeddings and output layers. Backbones are initialised when they are built.
        heads = (getattr(self, name, None) for name in ("lm_head", "score"))
        if isinstance(module, nn.Embedding) or any(module is head for head in heads):
            nn.init.normal_(cast(Tensor, module.weight), std=self.config.initializer_range)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: Any, *args: Any, **options: Any
    ) -> Any:
        # The backbone checks its option ``attention`` itself. It accepts names that transformers rejects.
        if self.config.chooses_attention:
            return attn_implementation
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **options)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False  # the attention is chosen when the backbone is built

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model. As in transformers, missing weights get new values, and a warning names them.

        Raises:
            ValueError: the checkpoint has weights for the layer that the configuration does not describe;
                ``device_map`` offloads weights of the layer; ``quantization_config`` quantises no map of the
                backbone.
            RuntimeError: weights have another shape, and ``ignore_mismatched_sizes`` is not true.
        """
        with_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("key_mapping", reference.KEYS)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        # Without this line, transformers would save renamed weights under their old names.
        vars(model).pop("_weight_conversions", None)
        # A name that still begins with ``backbone.`` comes from the reference implementation, and the key
        # mapping does not know it.
        body = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in ("layer", "backbone"))
        if unknown := sorted(name for name in info["unexpected_keys"] if name.startswith(body)):
            raise ValueError(
                "the checkpoint does not fit its configuration; the layer has no weights "
                f"{', '.join(unknown[:5])}"
            )
        layer: nn.Module = getattr(model, cls.base_model_prefix, model).layer
        if hasattr(model, "hf_quantizer") and not any(map(is_quantised, layer.modules())):
            raise ValueError(
                "quantization_config quantises no map of the backbone by torchao or bitsandbytes: it skips "
                "weight-normalised maps (save_pretrained(folder, fold_weight_norm=True) folds them), and may "
                "skip maps that are too small for its settings"
            )
        places = getattr(model, "hf_device_map", {})
        if {"cpu", "disk"} & set(places.values()) and any(p.is_meta for p in layer.parameters()):
            raise ValueError(
                "the layer must be on one device, because every iteration reads all its weights: raise "
                f"max_memory or change device_map, which is {places}"
            )
        _initialise(model, {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        return (model, info) if with_info else model

    def save_pretrained(self, *args: Any, fold_weight_norm: bool = False, **kwargs: Any) -> None:
        """Save the model.

        Args:
            fold_weight_norm: true: save a copy of the model whose linear maps and convolutions are plain, as
                :func:`deqseq.backbones.fold_weight_norm` makes them. The model itself does not change.
        """
        check_flag("fold_weight_norm", fold_weight_norm)
        model = folding.fold_weight_norm(deepcopy(self)) if fold_weight_norm else self
        super(ImplicitPreTrainedModel, model).save_pretrained(*args, **kwargs)


def _initialise(model: PreTrainedModel, names: set[str]) -> None:
    """Give weights of the layer the values that they have in a new model.

    A backbone initialises its weights when it is built. While transformers loads a model, the weights have no
    values yet, and :meth:`~ImplicitPreTrainedModel._init_weights` knows only embeddings and output layer.
    """
    weights = {name: w for name, w in model.state_dict().items() if name in names and "layer." in name}
    if weights:
        new = type(model)(model.config).state_dict()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(new[name])
