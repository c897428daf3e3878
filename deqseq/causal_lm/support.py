"""Check whether a model and a call of ``generate`` support decoding without the model's ``forward``.

``fast_generate``, ``stream`` and wavefront decoding compute new tokens without ``forward``.
"""

from typing import Any

from transformers.generation.configuration_utils import GenerationMode

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def check_layer(model: Any, function: str) -> None:
    """Raise ``ValueError`` if ``model`` cannot compute new tokens without calls of its ``forward``.

    Args:
        model: an ImplicitForCausalLM.
        function: the name of the function that generates, for the message.
    """
    backbone = model.model.layer.backbone
    if not backbone.keeps_state:
        raise ValueError(
            f"{function} needs a state, and {type(backbone).__name__} keeps no state: use generate"
        )
    for module in (model, model.model, model.model.layer, backbone):
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            raise ValueError(
                f"{function} does not call forward for new tokens, so the forward hooks of this "
                f"{type(module).__name__} (also those of FSDP, and of accelerate's device_map) would have no "
                "effect: remove them, or use generate"
            )


def unsupported(
    model: Any, config: Any, assistant_model: Any, synced_gpus: bool, options: dict[str, Any]
) -> dict[str, bool]:
    """The features of ``generate`` that these decoding methods lack, each with true if the call uses it.

    Args:
        model: an ImplicitForCausalLM.
        config: the generation config of the call.
        assistant_model, synced_gpus, options: arguments that ``generate`` passes to its decoding methods.
    """
    mode = config.get_generation_mode(assistant_model)
    with_dict = config.return_dict_in_generate
    return {
        f"{mode.value} (num_beams, assistant_model, ...)": mode not in _MODES,
        "use_cache=False": options.get("past_key_values") is None,
        "output_hidden_states": with_dict and config.output_hidden_states,
        "output_attentions": with_dict and config.output_attentions,
        "synced_gpus": synced_gpus,
        "prompt tuning": "prepare_inputs_for_generation" in vars(model),  # PEFT replaces this method
    }
