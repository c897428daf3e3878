"""Trains a model with the given settings, and saves the model in a folder."""

import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import Subset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.tasks.common.files import PART, locked, writing
from deqseq.tasks.common.processes import everywhere, on_every_node, on_first
from deqseq.tasks.common.runs import RunFolder, check_model, has_saved, read_settings
from deqseq.tasks.common.settings import defaults
from deqseq.tasks.common.tokenizer import check_same_tokens
from deqseq.tasks.pretraining.card import write_card
from deqseq.tasks.pretraining.data import Data, open_data
from deqseq.tasks.pretraining.settings import RESUMES, RunSettings
from deqseq.tasks.pretraining.start import config_to_start_from, make_model
from deqseq.tasks.pretraining.trainer import PretrainTrainer, Progress
from deqseq.tasks.pretraining.watch import Flops, Speed, peak_flops

logger = logging.getLogger(__name__)

_SHARED_FOLDER_TIMEOUT = 60  # seconds in which a shared file system must show a new file to all nodes


def pretrain(
    settings: RunSettings, output: str | Path, progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:  # fmt: skip
    """Train a model in folder ``output``. Resumes an interrupted run from its last complete checkpoint.

    Writes ``settings.json``, checkpoints and ``training.json`` (scores and log). At the end of every stage
    except the last, saves the model in ``stage-N/``. At the end of training, saves the final model, its
    tokenizer and a model card in ``model/``. If the run in ``output`` is finished already, does not train
    again. Returns the folder of the final model.

    Args:
        callbacks: further callbacks of transformers' Trainer.

    Raises:
        ValueError: ``output`` holds another run; the data are missing or too few, or do not fit the model's
            vocabulary; the rows of a step cannot be divided evenly among the processes.
        Diverged: a loss, gradient or equilibrium is not finite.
    """
    args = arguments(settings, Path(output), progress)
    state = PartialState()  # TrainingArguments has set up the process group
    data = everywhere(lambda: open_data(settings))
    kept = {**settings.to_dict(), "fingerprint": data.fingerprint, "order": data.order}
    everywhere(lambda: _check_order(Path(output), data))
    folder = everywhere(lambda: RunFolder(output, kept, RESUMES, defaults(RunSettings)))
    final = folder.path / "model"
    with ExitStack() as stack:
        on_first(lambda: stack.enter_context(folder.locked()))
        if on_first(folder.finished):
            if state.is_main_process:
                logger.info("%s is trained already", folder.path)
            return final
        if settings.stream is None:  # no preparation may replace the data during training
            data_folder = Path(str(settings.data))
            everywhere(lambda: stack.enter_context(locked(data_folder, "prepares", shared=True)))
        checkpoint = on_first(folder.last_checkpoint)
        _check_shared(folder.path)
        on_every_node(partial(check_start, settings, checkpoint, data))
        on_every_node(data.verify)
        trainer = everywhere(lambda: make_trainer(settings, data, args, checkpoint))
        for callback in callbacks:
            trainer.add_callback(callback)
        on_first(folder.start)
        if state.is_main_process:
            logger.info(
                "%d steps of %d tokens on %d x %s%s", settings.total_steps, settings.batch_tokens,
                state.num_processes, args.device.type, f", resuming from {checkpoint}" if checkpoint else "",
            )  # fmt: skip
        record = trainer.train_from(checkpoint)
        scores = trainer.final_scores(data.validation)
        with writing(final):
            trainer.save_model(str(final))
        if state.is_main_process:
            record["processes"] = state.num_processes
            record["validation"] = {name: scores[name] for name in scores if name.startswith("eval_")}
            logger.info("held-out perplexity %.2f", math.exp(scores["eval_loss"]))
            write_card(final, settings, record)
            folder.finish(record, [file for file in final.rglob("*") if file.suffix != ".md"])
        state.wait_for_everyone()
    return final


def _check_order(output: Path, data: Data) -> None:
    """Raise ``ValueError`` if the run in ``output`` began with another version of the shuffling method."""
    if data.order is None or not (output / "settings.json").exists() or not has_saved(output):
        return
    before = read_settings(output).get("order") or 1  # runs with order version 1 did not record the version
    if before != data.order:
        raise ValueError(
            f"the run in {output} has its rows in an order of version {before}, this program in one of "
            f"version {data.order}: finish the run with the deqseq that began it, or train anew in another "
            "folder"
        )


def _check_shared(folder: Path) -> None:
    """Raise ``ValueError`` if a process does not see a file that the first process writes to ``folder``."""
    file = on_first(lambda: folder / f"{time.time_ns()}{PART}")
    on_first(file.touch)

    def look() -> None:
        end = time.monotonic() + _SHARED_FOLDER_TIMEOUT
        while not (folder.is_dir() and file.name in os.listdir(folder)):
            if time.monotonic() > end:
                raise ValueError(
                    f"{folder} is not the folder that the first process sees: all nodes must share it"
                )
            time.sleep(0.1)

    try:
        everywhere(look)
    finally:
        if PartialState().is_main_process:
            file.unlink(missing_ok=True)


def make_trainer(
    settings: RunSettings, data: Data, args: TrainingArguments, checkpoint: Path | None = None
) -> PretrainTrainer:
    """The trainer of a run, with its model. Raises ``ValueError`` if weights are missing or do not fit."""
    model = make_model(settings, data, checkpoint)
    model.model.layer.gradient_checkpointing = settings.recompute
    if settings.compile and args.device.type != "cpu":
        _compile_blocks(model, settings.activation_budget)
    rows = args.gradient_accumulation_steps * settings.per_device_batch_size
    peak = peak_flops(args.device)
    flops = None if peak is None else Flops(model.config, settings.length)
    speed = Speed(flops, rows, settings.length, args.world_size, peak)
    few = range(len(data.validation))[: settings.eval_rows]
    trainer = PretrainTrainer(
        model, args, settings.curriculum(), speed, settings.spectral_every, settings.eval_at,
        train_dataset=data.train, eval_dataset=Subset(data.validation, few), processing_class=data.tokenizer,
    )  # fmt: skip
    # Do not print the log. It goes to the folder of the run and to ``report_to``.
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(Progress)
    return trainer


def check_start(settings: RunSettings, checkpoint: Path | None, data: Data | None = None) -> None:
    """Check what a run needs besides its data: the model to start from, and the tracker.

    Raises ``ValueError`` if one of them is missing, or if the model has another tokenizer than ``data``. The
    data may have further tokens if the model has an embedding for each: the run trains these embeddings. A
    run that resumes from ``checkpoint`` does not need the model in ``start_from``.
    """
    if settings.start_from is not None and checkpoint is None:
        config_to_start_from(settings.start_from, settings.config())
        check_model(settings.start_from)
        if data is not None:
            advice = "prepare the data with the tokenizer of the model"
            check_same_tokens(settings.start_from, data.tokenizer, "the data", advice)
    installed = get_available_reporting_integrations()
    if settings.report_to not in ("all", "none", "flyte", *installed):  # transformers does not list flyte
        raise ValueError(
            f"report_to must be all, none or an installed tracker ({', '.join(installed) or 'none is'}), got "
            f"{settings.report_to!r}"
        )


def _compile_blocks(model: ImplicitForCausalLM, budget: float) -> None:
    """Compile every block.

    ``budget``: share of the activations that blocks keep for the backward pass. Blocks recompute the other
    activations, which are the cheapest to compute.
    """
    import torch._dynamo.config
    import torch._functorch.config

    # Allow more compilations of a block than by default. A block is compiled again for each stage, for calls
    # without an autograd graph, and for a smaller last batch of an evaluation. Above the limit, PyTorch
    # runs the block uncompiled.
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.activation_memory_budget = budget
    body: Any = model.model.layer.backbone
    for block in body.layers:
        block.compile()


def arguments(settings: RunSettings, output: Path, progress: bool = True) -> TrainingArguments:
    """The Trainer's arguments. Raises ``ValueError`` if processes cannot share the rows of a step evenly."""
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=settings.total_steps,
        per_device_train_batch_size=settings.per_device_batch_size,
        per_device_eval_batch_size=settings.per_device_batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={
            "num_decay_steps": settings.decay_steps,
            "decay_type": "1-sqrt",
            "min_lr_ratio": settings.min_learning_rate / settings.learning_rate,
        },
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        use_cpu=not torch.accelerator.is_available(),  # transformers refuses bf16 on CPUs if this is false
        seed=settings.seed,
        full_determinism=settings.full_determinism,
        train_sampling_strategy="sequential",  # the dataset is already in order
        dataloader_num_workers=settings.workers if isinstance(settings.data, str) else 0,
        dataloader_pin_memory=torch.cuda.is_available(),
        accelerator_config={"non_blocking": torch.cuda.is_available()},  # do not wait for copies
        remove_unused_columns=False,
        prediction_loss_only=True,
        # After its first step, DDP adds gradients in another order, with other rounding errors. A resumed run
        # would change the order at another step. DDP keeps its order if it looks for unused parameters.
        ddp_find_unused_parameters=settings.full_determinism,
        logging_steps=settings.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # the trainer checks the losses itself
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        save_steps=settings.save_steps,
        save_total_limit=settings.keep,
        report_to=settings.report_to,
        disable_tqdm=not progress,
    )
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs, but one process: start one for each, accelerate launch --num_processes "
            f"{args.n_gpu} ..., or set CUDA_VISIBLE_DEVICES=0"
        )
    wanted = "bf16" if settings.bf16 else "no"
    if args.mixed_precision != wanted:
        if args.process_index == 0:
            logger.info("mixed precision: %s, not accelerate's %s", wanted, args.mixed_precision)
        args.mixed_precision = wanted
    args.gradient_accumulation_steps = settings.accumulation(args.world_size)
    return args
