"""Makes the model of a run: with new weights, or with the weights of a checkpoint or another model."""

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import set_seed

from deqseq.causal_lm import ImplicitConfig, ImplicitForCausalLM
from deqseq.causal_lm.conversion import inject_nothing
from deqseq.tasks.common.models import check_fits
from deqseq.tasks.pretraining.data import Data
from deqseq.tasks.pretraining.settings import RunSettings
from deqseq.tasks.pretraining.shards import is_sharded, load_weights

logger = logging.getLogger(__name__)


def make_model(settings: RunSettings, data: Data, checkpoint: Path | None = None) -> ImplicitForCausalLM:
    """The model of a run, in float32.

    Its weights come from ``checkpoint``, else from ``settings.start_from``. Else they are random.

    Implicit and injected models have the same weights, so they can start from each other. An explicit model
    has no injection. An implicit or injected run can start from an explicit model if the run's backbone has
    ``input_skip``. The run then starts with an injection of zero, and its map equals the explicit stack.

    Raises:
        ValueError: the model is larger than the memory; the weights cannot be loaded; the run's form cannot
            use the weights.
    """
    set_seed(settings.seed)
    config = data.fitted(settings.config())
    check_fits(config)
    source = checkpoint or settings.start_from
    if source is None:
        return ImplicitForCausalLM(config)
    before = config if checkpoint else config_to_start_from(source, config)
    try:
        if is_sharded(source):
            model = ImplicitForCausalLM(config)
            load_weights(model, source, skip=_names(config) - _names(before))
        else:
            model = ImplicitForCausalLM.from_pretrained(source, config=config, dtype=torch.float32)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"the model in {source} cannot be loaded: {error}") from error
    if _injects(config) and not _injects(before):
        inject_nothing(model.model.layer.backbone)
    logger.info("weights from %s", source)
    return model


def config_to_start_from(source: str | Path, config: ImplicitConfig) -> ImplicitConfig:
    """The configuration of the model in ``source``, from which a run with ``config`` starts.

    Raises ``ValueError`` if there is no model, or if the run's form cannot use its weights.
    """
    if not (Path(source) / "config.json").is_file():
        raise ValueError(f"no model to start from in {source}: it needs a config.json and weights")
    try:
        before = ImplicitConfig.from_pretrained(source)
        _check_forms(before, config)
    except (OSError, ValueError) as error:
        raise ValueError(f"the model in {source} cannot be loaded: {error}") from error
    return before


def _injects(config: ImplicitConfig) -> bool:
    return config.form != "explicit"


def _check_forms(before: ImplicitConfig, now: ImplicitConfig) -> None:
    """Raise ``ValueError`` if a model of configuration ``now`` cannot start from one of ``before``."""
    skip_before, skip_now = (bool(config.backbone.get("input_skip")) for config in (before, now))
    if _injects(before) and not _injects(now):
        raise ValueError(
            f"it is {before.form}, and the run is explicit: an explicit model has no injection, so it cannot "
            "use these weights. Train the injected form (NAME-injected), which evaluates the same map once"
        )
    if _injects(now) and not _injects(before) and not skip_now:
        raise ValueError(
            f"it is explicit, and the run is {now.form}: the weights expect the embeddings as the first "
            "block's input, and have no injection. Set --model.backbone.input_skip true: the run then starts "
            "with an injection of zero and computes what the explicit model computes"
        )
    if _injects(before) and skip_before != skip_now:
        raise ValueError(
            f"its backbone has input_skip: {str(skip_before).lower()}, and the run's has input_skip: "
            f"{str(skip_now).lower()}: set --model.backbone.input_skip {str(skip_before).lower()}"
        )


def _names(config: ImplicitConfig) -> set[str]:
    """The names of all weights of a model."""
    with torch.device("meta"):
        return set(ImplicitForCausalLM(config).state_dict())
