"""The configuration of implicit, injected and explicit causal language models."""

import json
import logging
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from deqseq.backbone import backbones
from deqseq.causal_lm import reference
from deqseq.checks import check_count, check_flag, check_not_negative, shown
from deqseq.gradient import gradients
from deqseq.problem import SolveOptions

logger = logging.getLogger(__name__)


# Settings that transformers accepts although they are not fields of a configuration.
_TRANSFORMERS = {
    "attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path", "num_labels",
    "output_attentions", "quantization_config", "torch_dtype", "_attn_implementation_internal",
    "_commit_hash", "_experts_implementation_internal", "_name_or_path",
}  # fmt: skip
# The settings that describe a part by a name or a mapping.
_PARTS = ("backbone", "solver", "gradient", "convergence", "eval_convergence", "guess")
# Sizes of the backbone under the names of transformers. They are properties of the configuration. to_dict()
# contains them too, because tools such as PEFT read them there.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")

# Saved folders contain the module _MODULE, which imports these classes from deqseq. With
# ``trust_remote_code``, transformers' Auto classes import this module. Users need not import deqseq first.
_MODULE = "modeling_deqseq"
_AUTO_MAP = {
    "AutoConfig": "ImplicitConfig",
    "AutoModel": "ImplicitModel",
    "AutoModelForCausalLM": "ImplicitForCausalLM",
    "AutoModelForSequenceClassification": "ImplicitForSequenceClassification",
}


def _unknown(settings: Mapping[str, Any]) -> list[str]:
    """The names in ``settings`` that are unknown to both transformers and :class:`ImplicitConfig`."""
    known = {*_TRANSFORMERS, *_SIZES, *vars(GenerationConfig()), *(f.name for f in fields(ImplicitConfig))}
    return sorted(name for name in settings if name not in known)


def check_names(settings: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if a name in ``settings`` is unknown."""
    if unknown := _unknown(settings):
        ours = sorted(set(ImplicitConfig.__annotations__) - {"model_type"})
        raise ValueError(
            f"unknown settings {', '.join(unknown)}; an ImplicitConfig has {', '.join(ours)}. Options "
            'of a part belong in its mapping: backbone={"name": "llama", "d_model": 64, ...} or '
            'convergence={"name": "residual", "rtol": 0.05, "max_iter": 64}'
        )


@strict
class ImplicitConfig(PreTrainedConfig):
    """The configuration of a causal language model, implicit or explicit, with any backbone.

    Give the backbone, solver, gradient strategy and policies as names or mappings
    ``{"name": ..., **options}``, as for :class:`~deqseq.ImplicitSequenceLayer`.

    Args:
        vocab_size: number of tokens in the vocabulary.
        backbone: the map f, such as ``{"name": "mamba2", "d_model": 256, "n_layer": 1}``.
        implicit: true: an implicit model. False: a model that evaluates the same stack once. It is explicit,
            f(x), by default, and injected, f(0, x), if the backbone has ``"injection": True``.
        solver, gradient: solver and gradient strategy of the implicit layer.
        convergence: convergence policy in training.
        eval_convergence: convergence policy in evaluation; by default the policy of training.
        window: number of tokens solved together; by default all.
        causal: true: training raises an error if the solver, the policy or the guess could make a token
            depend on later tokens.
        guess: decides where the search starts. With ``"previous"``, a call that continues a cache starts at
            the equilibrium of the last token in the cache.
        max_position_embeddings: length of the longest sequences that the model is meant for. Tools such as
            lm-eval read this setting. The model itself accepts sequences of any length. ``None``: unknown.
        initializer_range: standard deviation of the initial embeddings and output weights.
        use_cache: true: calls in evaluation mode return a cache by default.
        tie_word_embeddings: true: the output layer uses the embeddings as its weights.

    Raises:
        ValueError: unknown settings, names or options; a part or an option given as an object, which
            ``config.json`` cannot store; a window below 1; a backbone without ``d_model``; a size, such as
            ``hidden_size``, that contradicts the backbone.
    """

    model_type = "implicit_lm"
    keys_to_ignore_at_inference = ["past_key_values", "solution"]  # noqa: RUF012 - the trainer adds to the list

    vocab_size: int = 50277
    backbone: Any = None
    implicit: bool = True
    # Each of the next five settings is a name or a mapping, like ``backbone``. Objects raise ``ValueError``.
    solver: Any = "picard"
    gradient: Any = "phantom"
    convergence: Any = None
    eval_convergence: Any = None
    guess: Any = "zero"
    window: int | None = None
    causal: bool = True
    max_position_embeddings: int | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_names(kwargs)
        for name in _PARTS:
            if not isinstance(value := getattr(self, name), str | Mapping | None):
                raise ValueError(
                    f'{name} must be a name or a mapping such as {{"name": "...", "option": 1}}, which '
                    f"config.json can store, got {shown(value)}; deqseq.register names a class of your own"
                )
        if self.backbone is None:
            self.backbone = {"name": "mamba2", "d_model": 256, "n_layer": 1}
        self.backbone = {"name": self.backbone} if isinstance(self.backbone, str) else dict(self.backbone)
        if self.convergence is None:
            self.convergence = {"name": "residual", "rtol": 0.05, "max_iter": 32}
        own = self.eval_convergence is not None
        self.eval_convergence = deepcopy(self.eval_convergence if own else self.convergence)
        for name in _PARTS:
            try:
                json.dumps(value := getattr(self, name))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"config.json cannot store {name} {shown(value)}: {error}; give a part as a name or a "
                    "mapping, and options as numbers, text, lists or mappings"
                ) from error
        backbones.takes(self.backbone, "d_model")  # raises the error about an unknown name, which comes first
        if type(self.backbone.get("d_model")) is not int:
            raise ValueError(f"backbone needs a d_model, a whole number, got {self.backbone}")
        if "injection" in self.backbone:
            check_flag("injection", self.backbone["injection"])
        check_count("vocab_size", self.vocab_size)
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id must be below vocab_size = {self.vocab_size}, got {self.pad_token_id}"
            )
        check_not_negative("initializer_range", self.initializer_range)
        if self.max_position_embeddings is not None:
            check_count("max_position_embeddings", self.max_position_embeddings)
        for name in ("n_layer", "n_head", "n_kv_head"):
            if self.backbone.get(name) is not None:
                check_count(name, self.backbone[name])
        for name in kwargs.keys() & _SIZES:
            size, given = getattr(self, name, None), kwargs.pop(name)
            if given != size:
                raise ValueError(f"{name} follows from backbone={self.backbone}: it is {size}, got {given!r}")
        # Raise for a wrong option now, before a model is built.
        backbones.check(self.backbone)
        gradients.create(self.gradient)
        for policy in (self.convergence, self.eval_convergence):
            SolveOptions(self.solver, policy, self.window, self.guess)
        kwargs["auto_map"] = {
            **{auto: f"{_MODULE}.{name}" for auto, name in _AUTO_MAP.items()},
            **(kwargs.get("auto_map") or {}),
        }
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def _attn_implementation(self) -> str | None:
        """transformers' ``attn_implementation``: the backbone's option ``attention``, if it has one."""
        if self.chooses_attention:
            return str(self.backbone.get("attention", "sdpa"))
        return cast(str | None, self._attn_implementation_internal)

    @_attn_implementation.setter
    def _attn_implementation(self, value: str | dict[str, Any] | None) -> None:
        name = value.get("") if isinstance(value, Mapping) else value
        if name and self.chooses_attention:
            self.backbone = {**self.backbone, "attention": name}
        PreTrainedConfig._attn_implementation.fset(self, value)  # type: ignore[attr-defined]

    @property
    def chooses_attention(self) -> bool:
        """Whether the backbone takes an option ``attention``. The backbone itself checks its value."""
        return backbones.takes(self.backbone, "attention")

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "ImplicitConfig":
        """The paper's configuration ``name``, such as ``"llama-1.3b-free"``, with ``overrides`` applied.

        Raises:
            ValueError: no preset has this name; the message lists all presets.
        """
        from deqseq.causal_lm.presets import options

        return cls(**{**options(name), **overrides})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a configuration from ``config_dict``. ``kwargs`` replace fields before the fields are checked.

        Unknown settings in ``config_dict`` raise no error, because other packages also store settings in
        ``config.json``. The configuration keeps and saves unknown settings, and a warning names them.

        The field ``initial_guess`` of files of version 0.2.0 and earlier is read as ``guess``.
        """
        config_dict = dict(config_dict)
        if "initial_guess" in config_dict:
            config_dict.setdefault("guess", config_dict.pop("initial_guess"))
        if "backbone" in kwargs:  # the sizes in the file are those of the old backbone
            for name in config_dict.keys() & _SIZES:
                del config_dict[name]
        ours = {*cls.__annotations__, *_SIZES} & set(kwargs)
        settings = {**config_dict, **{name: kwargs.pop(name) for name in ours}}
        follows = config_dict.get("eval_convergence") == config_dict.get("convergence")
        if "convergence" in ours and "eval_convergence" not in ours and follows:
            settings["eval_convergence"] = None  # the new policy is for evaluation too
        extra = {name: settings.pop(name) for name in _unknown(settings)}
        made = super().from_dict(settings, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        for name, value in extra.items():
            setattr(config, name, value)
        if extra:
            logger.warning("the configuration has unknown settings, which are ignored: %s", ", ".join(extra))
        return made

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save ``config.json``, and a module that imports the classes of this package.

        The setting ``auto_map`` names this module. So transformers' Auto classes load the folder with
        ``trust_remote_code=True`` in a process that has not imported deqseq. deqseq must be installed.
        """
        super().save_pretrained(save_directory)
        module = Path(save_directory, f"{_MODULE}.py")
        module.write_text("".join(f"from deqseq.causal_lm import {name}\n" for name in _AUTO_MAP.values()))
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", module.parent.name), **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """Register a class derived from this one. For this class itself, do nothing.

        transformers registers the classes that ``auto_map`` names, and copies the files of registered classes
        into saved folders. The files of this package stay in the package.
        """
        if cls is not ImplicitConfig:
            super().register_for_auto_class(auto_class)  # type: ignore[no-untyped-call]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Read the settings of a configuration, and translate settings of the reference implementation.

        Raises:
            ValueError: the configuration is of another kind of model (``model_type``).
        """
        settings, unused = super().get_config_dict(*args, **kwargs)
        if reference.is_reference(settings):
            return reference.translate(settings), unused
        kind = settings.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise ValueError(
                f"{args[0] if args else 'this'} is a {kind!r}, not an {cls.model_type!r}; to "
                "convert transformers' Llama and Mamba2 models, use ImplicitForCausalLM.from_explicit(path)"
            )
        return settings, unused

    @property
    def form(self) -> Literal["implicit", "injected", "explicit"]:
        """What the model computes: a fixed point of f (implicit), f(0, x) (injected), or f(x) (explicit)."""
        if self.implicit:
            return "implicit"
        return "injected" if self.backbone.get("injection") else "explicit"

    @property
    def hidden_size(self) -> int:
        """Width D."""
        return int(self.backbone["d_model"])

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks in the backbone."""
        return int(self.backbone.get("n_layer", 1))

    @property
    def num_attention_heads(self) -> int:
        """Number of query heads. Backbones without the option ``n_head`` do not have this attribute."""
        if "n_head" not in self.backbone:
            raise AttributeError(f"the backbone has no n_head: {self.backbone}")
        return int(self.backbone["n_head"])

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads. Missing if the backbone has no ``n_head``."""
        return int(self.backbone.get("n_kv_head") or self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        """Width of an attention head. Missing if the backbone has no ``n_head``."""
        return self.hidden_size // self.num_attention_heads

    def to_dict(self) -> dict[str, Any]:
        """All settings, and the sizes of the backbone under the names of transformers."""
        sizes = {name: getattr(self, name) for name in _SIZES if hasattr(self, name)}
        return {**super().to_dict(), **sizes}


class _ReferenceConfig(PreTrainedConfig):
    """Lets ``AutoConfig`` load a configuration of the reference implementation as an ImplicitConfig."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return ImplicitConfig.from_dict(reference.translate(config_dict), **kwargs)


class ReferenceMamba2Config(_ReferenceConfig):
    model_type = "implicit_mamba2"


class ReferenceLlamaConfig(_ReferenceConfig):
    model_type = "implicit_llama3"
