"""Loads models and texts, and makes solve options for evaluation."""

import codecs
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

import deqseq.causal_lm  # noqa: F401 - registers the implicit models with AutoModelForCausalLM
from deqseq.checks import check_count
from deqseq.layer import ImplicitSequenceLayer
from deqseq.policies import Residual
from deqseq.problem import SolveOptions
from deqseq.solvers import Picard
from deqseq.tasks.common.runs import check_model, model_folder
from deqseq.tasks.common.tokenizer import check_reachable, first_line, is_local

Window = int | None | Literal["model"]
"""Number of tokens solved at a time. ``None``: all tokens. ``"model"``: the window of the model's evaluation
options."""

# Number of extra tokens that are read and then dropped. Cutting a text may change the tokens near the cut.
_SPARE = 64


def quiet_transformers() -> None:
    """Make transformers log only errors, and show no progress bars when it loads models."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def local_model(name: str) -> str:
    """``name``, or the folder of its model if ``name`` is a pretraining run.

    Raises:
        ValueError: ``name`` is a local path, and there is no model.
    """
    if is_local(name):
        name = str(model_folder(name))
        if not (Path(name) / "config.json").is_file():
            if (Path(name) / "settings.json").is_file():
                raise ValueError(f"the run in {name} has no model yet: repeat its command to finish it")
            raise ValueError(f"no model in {name}: the folder needs a config.json and weights")
    return name


def load_model(name: str, device: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """Load a model from a folder or the Hugging Face Hub, in evaluation mode.

    Args:
        name: folder of a model or of a pretraining run, or a name on the hub.
        device: by default a GPU if there is one, else the CPU.
        dtype: type of the weights; ``"auto"`` keeps the checkpoint's type.

    Raises:
        ValueError: transformers cannot load the model; the model belongs to a run and is incomplete or
            damaged; the device cannot be used.
    """
    name = local_model(name)
    check_reachable(name)
    if is_local(name):
        check_model(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).item()  # tensors on the device "meta" have no values
    except (RuntimeError, AssertionError, ImportError) as error:  # ImportError: "hpu"
        raise ValueError(f"the device {device} cannot be used: {first_line(error)}") from error
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        model.to(place)
    except Exception as error:
        # transformers, the hub, safetensors and torch raise many classes of errors.
        raise ValueError(f"the model {name} cannot be loaded: {first_line(error)}") from error
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # evaluation generates no tokens, so it needs no cache
    model.eval()
    return model


def check_fits(config: PreTrainedConfig) -> None:
    """Raise ``ValueError`` if the float32 weights of a model are larger than the machine's memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size, memory = 4 * sum(p.numel() for p in model.parameters()), psutil.virtual_memory().total
    if size > memory:
        raise ValueError(
            f"the model has {size / 4e9:,.1f}B parameters, {size / 2**30:,.0f} GiB in float32, and this "
            f"machine has {memory / 2**30:,.0f} GiB of memory: choose smaller sizes"
        )


def read_tokens(paths: Sequence[str], tokenizer: Any, limit: int | None = None) -> Tensor:
    """The tokens of the files, concatenated: (N,) int64, without special tokens. Line ends are kept.

    Args:
        limit: maximum number of predicted tokens. The first token is not predicted, so N is at most
            ``limit`` + 1. The files are read only as far as needed.

    Raises:
        ValueError: a file cannot be read, or is not UTF-8.
    """
    if limit is not None:
        check_count("limit", limit)
    tokens: list[int] = []
    for path in paths:
        wanted = None if limit is None else limit + 1 - len(tokens)
        try:
            with open(path, "rb") as file:
                tokens += _first_tokens(file, tokenizer, wanted)
        except OSError as error:
            raise ValueError(f"the text {path} cannot be read: {error}") from error
        except UnicodeDecodeError as error:
            wrong = f"{error.reason}, 0x{error.object[error.start]:02x} at offset {error.start}"
            raise ValueError(f"the text {path} is not UTF-8: {wrong}") from error
        if limit is not None and len(tokens) > limit:
            break
    return torch.tensor(tokens, dtype=torch.int64)


def _first_tokens(file: BinaryIO, tokenizer: Any, wanted: int | None) -> list[int]:
    """The first ``wanted`` tokens of the file (``None``: all). Reads only the beginning of a long file."""
    data, found, ended = b"", [], False
    while not ended:
        size = -1 if wanted is None else max(len(data), 8 * wanted)  # each later pass doubles the text
        piece = file.read(size)
        data += piece
        ended = len(piece) != size
        text, _ = codecs.utf_8_decode(data, "strict", ended)  # omits an incomplete last character
        found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if wanted is not None and len(found) >= wanted + _SPARE:
            break
    return found[:wanted]


def check_tokens(model: PreTrainedModel, tokens: Tensor) -> None:
    """Raise ``ValueError`` if a token is outside the model's vocabulary.

    Only the ids in ``tokens`` are checked. The tokenizer may have larger ids, such as the id of a padding
    token.
    """
    vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    if tokens.numel() and (largest := int(tokens.max())) >= vocabulary:
        raise ValueError(
            f"token {largest} is outside the model's vocabulary of {vocabulary}: "
            "the tokenizer is not this model's"
        )


def implicit_layer(model: torch.nn.Module) -> ImplicitSequenceLayer | None:
    """The implicit layer of a model; ``None`` if the model is explicit."""
    found = (module for module in model.modules() if isinstance(module, ImplicitSequenceLayer))
    return next(found, None)


def needed_layer(model: torch.nn.Module, what: str) -> ImplicitSequenceLayer:
    """The implicit layer of a model. Raises ``ValueError`` if the model is explicit.

    ``what``: name of the feature that needs the layer, for the error message.
    """
    layer = implicit_layer(model)
    if layer is None:
        raise ValueError(f"{what} is for implicit models, but this {type(model).__name__} is explicit")
    return layer


def solve_options(
    model: torch.nn.Module, window: Window = "model", rtol: float | None = None, max_iter: int | None = None,
    damping: float | None = None,
) -> SolveOptions | None:  # fmt: skip
    """The model's evaluation options, changed by the arguments; ``None`` for an explicit model.

    ``rtol`` and ``max_iter`` change the model's :class:`~deqseq.Residual` policy. If ``rtol`` or
    ``max_iter`` is given, a policy of another class is replaced by a ``Residual`` policy. The defaults of the
    new policy are ``rtol=1e-3`` and the ``max_iter`` of the model's policy.

    Args:
        window: number of tokens solved at a time.
        rtol: tolerance on the relative residual.
        max_iter: maximum number of evaluations per token.
        damping: if given, Picard's iteration with this damping replaces the model's solver.

    Raises:
        ValueError: an option is given for an explicit model, or a value is out of range.
    """
    if implicit_layer(model) is None and window == "model" and rtol is max_iter is damping is None:
        return None
    options = needed_layer(model, "a window, a tolerance (rtol), max_iter or a damping").eval_solve
    if window != "model":
        options = replace(options, window=window)
    if damping is not None:
        options = replace(options, solver=Picard(damping))
    if rtol is None and max_iter is None:
        return options
    own = options.convergence
    policy = own if isinstance(own, Residual) else Residual(rtol=1e-3, max_iter=own.max_iter)
    changes: dict[str, Any] = {"rtol": rtol, "max_iter": max_iter}
    policy = replace(policy, **{name: value for name, value in changes.items() if value is not None})
    return replace(options, convergence=policy)
