"""The causal language model: embeddings, one sequence layer, an output layer.

Shapes: B sequences, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import ModelOutput, can_return_tuple

from deqseq.backbone import take_tokens
from deqseq.backbones import folding
from deqseq.backbones.weights import is_quantised
from deqseq.causal_lm import conversion, reference
from deqseq.causal_lm.cache import EquilibriumCache, StateLayer
from deqseq.causal_lm.configuration import ImplicitConfig
from deqseq.causal_lm.wavefront import wavefront_generate
from deqseq.checks import check_count, check_flag, check_integers, check_tensor
from deqseq.inputs import packs_rows, real_tokens
from deqseq.layer import ExplicitSequenceLayer, ImplicitSequenceLayer
from deqseq.ops.cross_entropy import next_token_loss
from deqseq.problem import SolveOptions
from deqseq.solution import Solution


@dataclass
class ImplicitModelOutput(ModelOutput):
    """The output of :class:`ImplicitModel`.

    Attributes:
        last_hidden_state: (B, L, D) the equilibria z*, or the output of an explicit stack.
        past_key_values: the cache to pass to the next call; ``None`` if the call uses no cache.
        hidden_states: with ``output_hidden_states``, two tensors (B, L, D): the embeddings x and
            ``last_hidden_state``. Outputs of single blocks or iterations are not returned.
        solution: residual, iterations and status of every token; ``None`` for explicit models.
    """

    last_hidden_state: Tensor | None = None
    past_key_values: EquilibriumCache | None = None
    hidden_states: tuple[Tensor, Tensor] | None = None
    solution: Solution | None = None


@dataclass
class ImplicitCausalLMOutput(ModelOutput):
    """The output of the language model.

    Attributes:
        loss: mean cross-entropy of token t + 1 given the tokens up to t; ``None`` without labels.
        logits: (B, L, V), or (B, n, V) for n tokens in ``logits_to_keep``; ``None`` if a loss is
            computed with ``skip_logits``.
        past_key_values, hidden_states, solution: as in :class:`ImplicitModelOutput`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: EquilibriumCache | None = None
    hidden_states: tuple[Tensor, Tensor] | None = None
    solution: Solution | None = None


class ImplicitPreTrainedModel(PreTrainedModel):
    """Base class that loads and saves implicit and explicit models with any backbone."""

    config_class = ImplicitConfig
    config: ImplicitConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # Keep each layer on one device. accelerate moves weights between devices only when a module's forward is
    # called, but backbones read weights without calling forward.
    _no_split_modules = ["ImplicitSequenceLayer", "ExplicitSequenceLayer"]  # noqa: RUF012 - transformers' form

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


class ImplicitModel(ImplicitPreTrainedModel):
    """Embeddings and the sequence layer: (B, L) token ids -> (B, L, D) equilibria."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012 - the output layer

    def __init__(self, config: ImplicitConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer: ImplicitSequenceLayer | ExplicitSequenceLayer
        if config.implicit:
            self.layer = ImplicitSequenceLayer(
                config.backbone, solver=config.solver, gradient=config.gradient, window=config.window,
                convergence=(config.convergence, config.eval_convergence), causal=config.causal,
                guess=config.guess,
            )  # fmt: skip
        else:
            self.layer = ExplicitSequenceLayer({"injection": False, **config.backbone})
        if not self.layer.backbone.causal:
            raise ValueError(f"a language model needs a causal backbone, got {config.backbone}")
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: EquilibriumCache | None = None,
        inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        output_hidden_states: bool | None = None, solve: SolveOptions | None = None,
        window: int | Literal["layer"] | None = "layer", z0: Tensor | None = None, **unused: Any,
    ) -> ImplicitModelOutput:  # fmt: skip
        """Solve for the equilibria of a batch.

        Args:
            input_ids: (B, L) int64 token ids. Give either ``input_ids`` or ``inputs_embeds`` (B, L, D).
            attention_mask: (B, L), 1 or true for real tokens, 0 or false for padding. Padding may be
                anywhere. With a cache of C columns, the mask may also be (B, C + L). The columns of earlier
                calls then come first.
            position_ids: (B, L) or (1, L) int64. Where positions restart at 0, another sequence begins.
            past_key_values: the cache of an earlier call, which this call continues and extends.
            use_cache: true: return a cache. By default, a call that gets a cache returns this cache. If a
                call gets no cache, the configuration decides whether to make one. In training, or if a row
                holds several sequences, no cache is made by default.
            output_hidden_states: true: return ``hidden_states``. By default the configuration decides.
            solve: solver, policy, window and guess; by default the configuration's.
            window: number of tokens solved together; ``None``: all; ``"layer"``: the window of ``solve`` or,
                without ``solve``, of the configuration.
            z0: (B, L, D) initial guess, instead of the guess of ``solve`` or of the configuration.
            unused: arguments that tokenizers, collators and ``generate`` may add. They have no effect here:
                ``token_type_ids``, ``cache_position``, ``tokenizer``, ``output_attentions=False``, and the
                sequence boundaries of flattened batches (``position_ids`` also contains these boundaries).

        Raises:
            ValueError: ``input_ids`` and ``inputs_embeds`` are both given or both missing; on the CPU, ids
                that are not in the vocabulary (a GPU raises its own error); a mask that has another shape or
                contradicts the masks of earlier calls; a cache of another model; ``solve``, ``window`` or
                ``z0`` for an explicit model; inputs that the layer rejects; unknown arguments.
        """
        _check_unused(unused)
        if getattr(self, "_is_replica", False):
            raise ValueError(
                "nn.DataParallel cannot gather the solutions: start one process per GPU (accelerate launch, "
                "torchrun), or use one GPU only (CUDA_VISIBLE_DEVICES=0)"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self._embedded(input_ids)
        check_tensor("inputs_embeds", inputs_embeds)
        if inputs_embeds.dim() != 3:
            raise ValueError(f"inputs_embeds must be (B, L, D), got {tuple(inputs_embeds.shape)}")
        batch, length, _ = inputs_embeds.shape
        for name, value in ("attention_mask", attention_mask), ("position_ids", position_ids):
            if value is not None:
                check_tensor(name, value)
        if use_cache is not None:
            check_flag("use_cache", use_cache)
        if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[0] == 1:
            position_ids = position_ids.expand(batch, -1)
        if use_cache is None and past_key_values is None:
            use_cache = self._caches(inputs_embeds, position_ids, attention_mask)
        cache = self._cache(past_key_values, use_cache)
        content = None if cache is None else cache.content
        attention_mask = _mask_of_call(attention_mask, length, content)
        state = None
        if content is not None:
            backbone = self.layer.backbone
            state = content.starting_state(
                backbone.initial_state(batch, inputs_embeds.device, inputs_embeds.dtype)
            )
        options: dict[str, Any] = {}
        if isinstance(self.layer, ImplicitSequenceLayer):
            previous = None if content is None else content.equilibrium
            options = {"solve": solve, "window": window, "z0": z0, "previous": previous}
        elif window != "layer" or z0 is not None or solve is not None:
            raise ValueError("an explicit model is not solved: it takes no solve, window or z0")
        out = self.layer(inputs_embeds, attention_mask, position_ids=position_ids, state=state, **options)
        if content is not None:
            content.commit(out.state, out.z, attention_mask)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden = (inputs_embeds, out.z) if output_hidden_states else None
        return ImplicitModelOutput(
            last_hidden_state=out.z, past_key_values=cache, hidden_states=hidden, solution=out.solution
        )

    def _embedded(self, input_ids: Tensor) -> Tensor:
        """The embeddings (B, L, D) of the ids. Ids outside the vocabulary raise an error."""
        check_tensor("input_ids", input_ids)
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be (B, L), got {tuple(input_ids.shape)}")
        check_integers("input_ids", input_ids)
        try:
            embedded: Tensor = self.embed_tokens(input_ids)
        except IndexError as error:
            least, most = (int(id) for id in input_ids.aminmax())
            size = self.embed_tokens.weight.shape[0]
            raise ValueError(f"input_ids must be in [0, {size}), got {least} to {most}") from error
        return embedded

    def _caches(self, x: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None) -> bool:
        """Whether a call without ``use_cache`` and without a cache makes a new cache."""
        if self.training or not self.config.use_cache or not self.layer.backbone.keeps_state:
            return False
        fits = all(t is None or t.shape == x.shape[:2] for t in (position_ids, attention_mask))
        # Call ``packs_rows`` only on tensors of the right shape. For other shapes, the layer raises an error.
        return position_ids is None or not fits or not packs_rows(position_ids, attention_mask)

    def _cache(self, given: Cache | None, use_cache: bool | None) -> EquilibriumCache | None:
        """The cache to fill and return: ``given`` or a new cache; ``None`` if the call uses no cache."""
        if given is not None and not isinstance(given, EquilibriumCache):
            raise ValueError(
                f"past_key_values must be the EquilibriumCache of an earlier call, got {type(given).__name__}"
            )
        if use_cache is False or (given is None and not use_cache):
            if given is not None:
                raise ValueError("past_key_values were given, but use_cache is False")
            return None
        if not self.layer.backbone.keeps_state:
            raise ValueError(
                f"{type(self.layer.backbone).__name__} keeps no state, so there is nothing to cache: leave "
                "use_cache unset"
            )
        if given is None:
            return EquilibriumCache(self.layer.backbone.rewinds)
        content = given.content
        if content.state is None and content.is_croppable and not self.layer.backbone.rewinds:
            raise ValueError(
                "this model cannot remove tokens from its cache: make it with EquilibriumCache(rewinds=False)"
            )
        return given


def _mask_of_call(mask: Tensor | None, length: int, content: StateLayer | None) -> Tensor | None:
    """The part (B, L) of the attention mask that belongs to this call: its last L columns."""
    if mask is None or (mask.dim() == 2 and mask.shape[1] == length):
        return mask
    seen = 0 if content is None else content.get_seq_length()
    if mask.dim() != 2 or mask.shape[1] != seen + length:
        raise ValueError(
            f"attention_mask must be (B, L) for the {length} tokens of the call, or (B, C + L) with the "
            f"{seen} columns of earlier calls, got {tuple(mask.shape)}"
        )
    before = None if content is None else content.real
    same_batch = before is not None and before.shape[0] == mask.shape[0]
    if same_batch and not torch.equal(real_tokens(mask[:, :seen]), cast(Tensor, before)):
        raise ValueError(
            "attention_mask differs from the masks of earlier calls in their columns: tokens that a cache "
            "has consumed cannot be masked afterwards"
        )
    return mask[:, -length:]


def last_real(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The hidden state of each row's last real token: (B, 1, D).

    A row without real tokens gets the hidden state of its last column.

    Args:
        hidden: (B, L, D).
        attention_mask: (B, C + L). Its last L columns belong to ``hidden``.
    """
    length = hidden.shape[1]
    if length == 1:
        return hidden
    real = attention_mask[:, -length:].bool()
    number = torch.arange(1, length + 1, device=hidden.device)
    last = torch.where(real.any(1), (real * number).argmax(1), length - 1)
    return take_tokens(hidden, last[:, None])


def _check_kept(logits_to_keep: int | Tensor, length: int) -> None:
    """Raise ``ValueError`` if ``logits_to_keep`` is not a valid number of tokens or tensor of token indices.

    The values of indices are checked on the CPU only.
    """
    if not isinstance(logits_to_keep, Tensor):
        check_count("logits_to_keep", logits_to_keep, least=0, most=length)
        return
    check_integers("logits_to_keep", logits_to_keep)
    if logits_to_keep.dim() != 1:
        raise ValueError(f"logits_to_keep must have one dimension, got {tuple(logits_to_keep.shape)}")
    if logits_to_keep.device.type == "cpu":
        wrong = logits_to_keep[(logits_to_keep < -length) | (logits_to_keep >= length)]
        if wrong.numel():
            raise ValueError(f"logits_to_keep must be in [{-length}, {length}), got {int(wrong[0])}")


def aligned_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, padded with zero columns to a multiple of 64. GPUs compute such widths faster."""
    return F.linear(x, F.pad(weight, (0, 0, 0, -weight.shape[0] % 64)))


_UNUSED_ARGUMENTS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx",
    "output_attentions", "token_type_ids", "tokenizer",
}  # fmt: skip


def _check_longer(held: int, inputs: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the text of ``generate`` is longer than a cache of ``held`` tokens."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None:
        length = mask.shape[1]
    elif positions is not None:  # without a mask, there is no padding
        length = int(positions.max()) + 1
    else:
        return
    if 0 < length <= held:
        raise ValueError(
            f"past_key_values holds {held} tokens, and the text has {length}: pass the whole text, which "
            "must have at least one token more than the cache"
        )


def _check_unused(arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for ``output_attentions=True`` and for arguments not in _UNUSED_ARGUMENTS."""
    if arguments.get("output_attentions"):
        raise ValueError("output_attentions: these models keep no attention weights")
    if unknown := set(arguments) - _UNUSED_ARGUMENTS:
        raise ValueError(f"unknown arguments {sorted(unknown)}")


class ImplicitForCausalLM(ImplicitPreTrainedModel, GenerationMixin):
    """A causal language model: an :class:`ImplicitModel` (implicit or explicit) and a linear output layer."""

    _tied_weights_keys = {  # noqa: RUF012 - transformers declares it as an instance variable
        "lm_head.weight": "model.embed_tokens.weight"
    }

    def __init__(self, config: ImplicitConfig) -> None:
        super().__init__(config)
        self.model = ImplicitModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # True: the cache cannot remove tokens. transformers' speculative decoding then raises an error.
        self._is_stateful = not self.model.layer.backbone.rewinds
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_explicit(
        cls, source: str | os.PathLike[str] | PreTrainedModel, weight_norm: bool = True,
        dtype: torch.dtype | None = None, **config_overrides: Any,
    ) -> ImplicitForCausalLM:  # fmt: skip
        """Convert a ``LlamaForCausalLM`` or ``Mamba2ForCausalLM`` of transformers into an explicit model.

        The logits stay the same, up to rounding. Device and mode (training or evaluation) stay the same too.

        Args:
            source: the model, or its folder or name on the hub.
            weight_norm: true: use weight normalisation in the backbone, as implicit models do by default.
            dtype: type of the weights; by default the type of ``source``.
            config_overrides: further settings of :class:`ImplicitConfig`, such as ``solver``. A later call of
                :meth:`to_implicit` uses these settings.

        Raises:
            ValueError: a model of another class; a setting that this library's backbones do not support
                (biases, scaled rotary positions, another activation, a bounded time step, ...).
        """
        return conversion.from_explicit(cls, source, weight_norm, dtype, config_overrides)

    def to_implicit(self, **config_overrides: Any) -> ImplicitForCausalLM:
        """Make an implicit model with the weights of this explicit or injected model.

        If this model is injected, the new model iterates the same map f(z, x). At z = 0, the map returns the
        output of this model.

        If this model is explicit, the new model differs in two places: its first block gets ``gain * z + x``
        instead of x (the backbone's ``input_skip``), and x is injected into every block. The gain and the
        injection start at 0. So f(z, x) initially does not depend on z and equals the explicit stack, and a
        search needs two evaluations. The gain and the injection get gradients from the first step on.

        Args:
            config_overrides: settings of :class:`ImplicitConfig`, such as ``solver`` and ``convergence``.

        Raises:
            ValueError: this model is implicit; ``config_overrides`` has a setting that must stay the same.
        """
        return conversion.to_implicit(self, config_overrides)

    def generate(self, *args: Any, wavefront: int | None = None, **options: Any) -> Any:
        """Generate tokens: transformers' ``generate``, with one more argument.

        Args:
            wavefront: solve up to this number of new tokens at once. Only for greedy decoding with implicit
                models. The tokens are those of ordinary greedy decoding, up to the tolerance of the search.
                One evaluation of f works on several tokens, so generation needs fewer evaluations in
                sequence. A cache that you pass gets the tokens of the prompt only, not the new tokens.

        Raises:
            ValueError: ``wavefront`` is below 1, or is combined with a feature that it does not support, such
                as sampling or beams.
        """
        if wavefront is not None:
            check_count("wavefront", wavefront)
            if options.get("custom_generate") is not None:
                raise ValueError("give either wavefront or custom_generate")
            options["custom_generate"] = partial(wavefront_generate, wavefront=wavefront)
        return super().generate(*args, **options)  # type: ignore[misc]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: EquilibriumCache | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None, use_cache: bool | None = None,
        output_hidden_states: bool | None = None, logits_to_keep: int | Tensor = 0,
        solve: SolveOptions | None = None, window: int | Literal["layer"] | None = "layer",
        z0: Tensor | None = None, skip_logits: bool = False, **loss_options: Any,
    ) -> ImplicitCausalLMOutput:  # fmt: skip
        """Compute logits (B, L, V) and, with ``labels`` (B, L), the loss of predicting the next token.

        As in transformers, pass the input ids as ``labels``. This method shifts the labels and ignores -100.
        If your labels are shifted already, pass them as ``shift_labels``.

        Args:
            labels: (B, L) int64 ids, or -100.
            logits_to_keep: number of last tokens to compute logits for, at most L (0: all tokens), or indices
                of the tokens (n,). With 1, each row gets the logits of its last real token, so ``generate``
                accepts prompts with padding at any place.
            skip_logits: true: with labels, return the loss and no logits. This saves memory, because
                mixed-precision wrappers copy returned logits to float32.
            loss_options: ``num_items_in_batch``, which transformers' trainer passes, and ``shift_labels``
                (B, L), shifted labels that replace ``labels``. Other arguments are ignored or raise
                ``ValueError``, as in :meth:`ImplicitModel.forward`.

        The other arguments are those of :meth:`ImplicitModel.forward`.
        """
        options = {"num_items_in_batch", "shift_labels"}
        _check_unused({name: value for name, value in loss_options.items() if name not in options})
        loss_options = {name: value for name, value in loss_options.items() if name in options}
        shifted = loss_options.get("shift_labels")
        out = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache,
            output_hidden_states=output_hidden_states, solve=solve, window=window, z0=z0,
        )  # fmt: skip
        _check_kept(logits_to_keep, out.last_hidden_state.shape[1])
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = out.last_hidden_state[:, keep]
        if isinstance(logits_to_keep, int) and logits_to_keep == 1 and attention_mask is not None:
            hidden = last_real(out.last_hidden_state, attention_mask)
        logits, padded = self._logits(hidden)
        loss = None
        if labels is not None or shifted is not None:
            whole = isinstance(logits_to_keep, int) and not logits_to_keep
            for name, given in (("labels", labels), ("shift_labels", shifted)):
                if given is None:
                    continue
                check_tensor(name, given)
                check_integers(name, given)
                if not (whole and logits.shape[:2] == given.shape):
                    raise ValueError(
                        f"{name} must have the shape of the logits, {tuple(logits.shape[:2])}, got "
                        f"{tuple(given.shape)}; the loss needs the logits of all tokens (logits_to_keep=0)"
                    )
            labels = None if labels is None else labels.long()
            vocab_size = self.config.vocab_size
            ours = self.loss_function is ForCausalLMLoss and shifted is None
            if ours and labels is not None and logits.shape[-1] == vocab_size:
                loss = next_token_loss(padded, labels, vocab_size, **loss_options)
            else:  # the user set a loss or resized the output layer
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab_size, **loss_options)
        return ImplicitCausalLMOutput(
            loss=loss, logits=None if skip_logits and loss is not None else logits,
            past_key_values=out.past_key_values, hidden_states=out.hidden_states, solution=out.solution,
        )  # fmt: skip

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits (B, L, V) and padded logits (B, L, V'). Their first V columns are equal."""
        head = self.lm_head
        plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.bias is None
        if not (hidden.is_cuda and plain) or head._forward_hooks or head._forward_pre_hooks:
            logits = head(hidden)
            return logits, logits
        padded = aligned_linear(hidden, head.weight)
        return padded[..., : head.weight.shape[0]], padded

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: Any) -> Tensor:
        """Positions (B, L) that count real tokens only. Padding gets the position of the token before it.

        ``generate`` adds 1 to the last column's position to get the first new token's position. transformers
        gives padding position 0. So after padding in the last column, the new token would get position 1.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return (real_tokens(mask).long().cumsum(-1) - 1).clamp_min(0)

    def _extract_generation_mode_kwargs(
        self, custom_generate: Any, kwargs: dict[str, Any], *standard: Any
    ) -> dict[str, Any]:
        """The arguments of ``generate`` for the decoding method.

        If ``custom_generate`` is a function, transformers drops some arguments, such as ``streamer``. This
        method keeps those for which the function has a parameter.
        """
        usual = super()._extract_generation_mode_kwargs(None, dict(kwargs), *standard)
        found = super()._extract_generation_mode_kwargs(custom_generate, kwargs, *standard)
        if callable(custom_generate):
            accepted = inspect.signature(custom_generate).parameters
            found.update({name: value for name, value in usual.items() if name in accepted})
        return found

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Give ``generate`` an :class:`EquilibriumCache` instead of transformers' cache."""
        refused = {"cache_implementation": "one kind of cache", "assistant_early_exit": "no early exit"}
        for option, reason in refused.items():
            value = getattr(generation_config, option)
            if value is not None and value != "dynamic":  # "dynamic": a growing cache, like ours
                raise ValueError(f"these models have {reason}: leave {option} unset, got {value!r}")
        if (cache := model_kwargs.get("past_key_values")) is not None:
            if isinstance(cache, EquilibriumCache):
                _check_longer(cache.get_seq_length(), model_kwargs)
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, *args, **kwargs
            )
        elif not self.model.layer.backbone.keeps_state:
            generation_config.use_cache = model_kwargs["use_cache"] = False
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = EquilibriumCache(self.model.layer.backbone.rewinds)
