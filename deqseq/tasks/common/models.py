"""Models and texts for the reports, and how an implicit model is solved while one is made.

Shapes: N tokens of a text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

import deqseq.causal_lm  # noqa: F401 - registers the implicit models with AutoModelForCausalLM
from deqseq.checks import check_count
from deqseq.layer import ImplicitSequenceLayer
from deqseq.policies import Residual
from deqseq.policy import ConvergencePolicy
from deqseq.tasks.common.tokenizer import first_line, is_local

Window = int | None | Literal["model"]
"""Tokens solved at a time; ``None``: all; ``"model"``: the model's own."""

# A cut may change the tokens beside it, so a text that is read up to a limit is read by so many more.
_SPARE = 64


def quiet_transformers() -> None:
    """Errors only, and no bar as weights load: for programs with something to print of their own."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def load_model(name: str, device: str | None = None, dtype: str = "auto") -> PreTrainedModel:
    """The model of a folder or of the hub, ready for evaluation.

    Args:
        device: a GPU if there is one, by default.
        dtype: ``"auto"``: the checkpoint's.

    Raises:
        ValueError: nothing there that transformers can load; a device that is not there.
    """
    if is_local(name) and not (Path(name) / "config.json").is_file():
        raise ValueError(f"no model in {name}: the folder needs a config.json and weights")
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        model.to(place)
    except Exception as error:
        # transformers, the hub, safetensors and torch each report with classes of their own.
        raise ValueError(f"the model {name} cannot be loaded: {first_line(error)}") from error
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # nothing is generated, so keys and values need not be kept
    model.eval()
    loaded: PreTrainedModel = model
    return loaded


def read_tokens(paths: Sequence[str], tokenizer: Any, limit: int | None = None) -> Tensor:
    """The tokens (N,) int64 of the files, one after the other, without special tokens; line ends as they are.

    Args:
        limit: tokens to predict; N is then at most one more, for the first is not predicted. No more is
            read than they need.

    Raises:
        ValueError: a file that is not there or not UTF-8.
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
    """So many tokens of a file, or all; as if all of it had been tokenised."""
    data, found, ended = b"", [], False
    while not ended:
        size = -1 if wanted is None else max(len(data), 8 * wanted)  # doubles the text
        piece = file.read(size)
        data += piece
        ended = len(piece) != size
        text, _ = codecs.utf_8_decode(data, "strict", ended)  # until the end, without a cut character
        found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if wanted is not None and len(found) >= wanted + _SPARE:
            break
    return found[:wanted]


def check_tokens(model: PreTrainedModel, tokens: Tensor) -> None:
    """Raise ``ValueError`` if a token is outside the model's vocabulary.

    Of tokens that occur, not of the tokenizer: it may know some that no text has, such as one for padding.
    """
    vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    if tokens.numel() and (largest := int(tokens.max())) >= vocabulary:
        raise ValueError(
            f"token {largest} is outside the model's vocabulary of {vocabulary}: "
            "the tokenizer is not this model's"
        )


def implicit_layer(model: torch.nn.Module) -> ImplicitSequenceLayer | None:
    """The implicit layer of a model; ``None`` for explicit ones."""
    found = (module for module in model.modules() if isinstance(module, ImplicitSequenceLayer))
    return next(found, None)


def needed_layer(model: torch.nn.Module, what: str) -> ImplicitSequenceLayer:
    """The implicit layer of a model.

    Raises:
        ValueError: the model is explicit, and has no use for ``what``.
    """
    layer = implicit_layer(model)
    if layer is None:
        raise ValueError(f"{what} is for implicit models, but this {type(model).__name__} is explicit")
    return layer


def window_name(layer: ImplicitSequenceLayer | None) -> int | str | None:
    """How reports write a layer's window: a number or ``"all"``; ``None`` for explicit models."""
    return None if layer is None else layer.window or "all"


def tolerance_and_budget(
    model: torch.nn.Module, rtol: float | None = None, max_iter: int | None = None
) -> ConvergencePolicy | None:
    """The model's evaluation policy with another tolerance or budget; ``None`` if neither is given.

    A model whose policy is not a :class:`~deqseq.Residual` gets one, of 1e-3 unless ``rtol`` says else.
    """
    if rtol is None and max_iter is None:
        return None
    layer = needed_layer(model, "a tolerance or a budget")
    own = layer.eval_convergence
    base = own if isinstance(own, Residual) else Residual(rtol=1e-3, max_iter=own.max_iter)
    return replace(
        base,
        rtol=base.rtol if rtol is None else rtol,
        max_iter=base.max_iter if max_iter is None else max_iter,
    )


@contextmanager
def solving(
    model: torch.nn.Module, window: Window = "model", policy: ConvergencePolicy | None = None
) -> Iterator[ImplicitSequenceLayer | None]:
    """The model with another window or evaluation policy, for a while; gives its implicit layer.

    Raises:
        ValueError: either is given for an explicit model; a window below 1.
    """
    if window == "model" and policy is None:
        yield implicit_layer(model)
        return
    layer = needed_layer(model, "a window" if policy is None else "a tolerance or a budget")
    before = layer.window, layer.train_convergence, layer.eval_convergence
    if window != "model":
        if window is not None:
            check_count("window", window)
        layer.window = window
    if policy is not None:
        layer.set_convergence((layer.train_convergence, policy))
    try:
        yield layer
    finally:
        layer.window, layer.train_convergence, layer.eval_convergence = before
