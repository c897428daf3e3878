"""Trains the models of benchmarks/what_iteration_buys.py, and measures the time of a training step."""

import gc
import json
import logging
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from iteration import results
from iteration.forms import Budget, Form, Study
from iteration.results import Result
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Mamba2Config,
    PreTrainedModel,
    TrainerCallback,
    set_seed,
)

from deqseq.causal_lm import ImplicitForCausalLM
from deqseq.policy import policies
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import changes, describe_machine, provenance
from deqseq.tasks.common.runs import RunFolder, read_json, read_record, read_settings
from deqseq.tasks.common.settings import build, defaults, flat
from deqseq.tasks.pretraining.card import scores
from deqseq.tasks.pretraining.data import open_data
from deqseq.tasks.pretraining.settings import RESUMES, RunSettings
from deqseq.tasks.pretraining.train import arguments, make_trainer, pretrain

logger = logging.getLogger(__name__)

# How many times a run logs, saves a checkpoint and evaluates.
_TIMES_IN_A_RUN = {"log_steps": 50, "save_steps": 4, "eval_steps": 1}
_NO_MATTER = {"data", "eval_rows", "steps"}  # settings that do not change the time of a step
_WARM_UP = 5  # steps that are not timed: the first ones compile
_STEADY = 0.25  # largest relative difference of the times of a step that give a reliable median


def train_one(
    study: Study, form: Form, budget: Budget, learning_rate: float, seed: int, points: int, keep: bool = False
) -> Result:
    """Train one model in the folder of the study, or read its result if the run has finished already.

    Args:
        points: number of evaluations during training, at equal shares of the budget.
        keep: whether to keep the model and the last checkpoints.

    Raises:
        ValueError: the folder holds a run with other settings; the budget is too small; the data is missing.
    """
    stages = study.stages(form)
    times = [seconds_of_a_step(study, name) for name, _ in stages]
    plan = budget.plan([end for _, end in stages], times, study.base.batch_tokens, points)
    plan |= {"learning_rate": learning_rate, "min_learning_rate": learning_rate / 100, "seed": seed}
    plan |= {name: math.ceil(plan["steps"] / n) for name, n in _TIMES_IN_A_RUN.items()}
    folder = Path(study.output, budget.name, form, f"lr-{learning_rate:g}", f"seed-{seed}")
    start = folder.with_name(f"{folder.name}-start")
    if form == "transformers":
        plan["start_from"] = str(start)
    settings = study.settings(stages, **plan)
    data = open_data(settings)
    kept = {**settings.to_dict(), "fingerprint": data.fingerprint, "order": data.order}
    RunFolder(folder, kept, RESUMES, defaults(RunSettings))  # raises ValueError if the folder has another run
    file = folder / results.FILE
    if file.exists():
        return results.read(file)
    logger.info("%s", folder)
    if form == "transformers":
        initialise(settings, start)
    _forget_compiled(settings)
    pretrain(settings, folder)
    result = _result(study, form, budget, settings, times, folder, data.fingerprint)
    write_json(file, asdict(result))
    if not keep:
        for made in (start, folder / "model", *folder.glob("checkpoint-*"), *folder.glob("stage-*")):
            shutil.rmtree(made, ignore_errors=True)
    gc.collect()
    return result


def _result(
    study: Study, form: Form, budget: Budget, settings: RunSettings, times: Sequence[float], folder: Path,
    fingerprint: str,
) -> Result:  # fmt: skip
    """The result of the finished run in ``folder``. ``times``: seconds of a step in every stage."""
    record = read_record(folder)
    log, device = record["log"], torch.device(record["device"])
    last = [entry for entry in log if "eval_loss" in entry][-1]  # after training, on all held-out rows
    ends = [0, *settings.stage_ends]
    spent = np.cumsum([0.0, *np.diff(ends) * times])  # seconds at the end of every stage
    run_seconds = None if device.type == "cpu" else round(float(np.diff(ends) @ _run_times(log, settings)), 2)
    curve = [
        {"tokens": point.tokens, "seconds": round(float(np.interp(point.step, ends, spent)), 3),
         "perplexity": point.perplexity}
        for point in scores(log, settings).values()
    ]  # fmt: skip
    return Result(
        model=study.title, form=form, unit=budget.unit, amount=budget.amount, seed=settings.seed,
        learning_rate=settings.learning_rate, parameters=record["parameters"], steps=settings.total_steps,
        tokens=settings.total_steps * settings.batch_tokens, seconds=round(float(spent[-1]), 2),
        run_seconds=run_seconds,
        perplexity=math.exp(last["eval_loss"]), iterations=last.get("eval_iterations"), curve=curve,
        data=fingerprint, **provenance(device),
    )  # fmt: skip


def _forget_compiled(settings: RunSettings) -> None:
    """Drop the code that earlier runs compiled. PyTorch limits how often one process compiles a function."""
    if settings.compile:
        torch.compiler.reset()


def _run_times(log: Sequence[dict[str, float]], settings: RunSettings) -> list[float]:
    """Seconds of a step in every stage of a run: medians of its log. Compilation does not count.

    A stage that is too short for a line in the log has the median of the whole run.
    """
    lines, times = [entry for entry in log if "tokens_per_second" in entry], []
    for first, end in pairwise([0, *settings.stage_ends]):
        of_stage = [line for line in lines if first < line["step"] <= end]
        speed = statistics.median(line["tokens_per_second"] for line in of_stage or lines)
        times.append(settings.batch_tokens / speed)
    return times


def initialise(settings: RunSettings, folder: Path) -> PreTrainedModel:
    """Make a new model of transformers, and write it to ``folder`` as an explicit model of this library."""
    ours = open_data(settings).fitted(settings.config())
    with torch.device("meta"):
        body: Any = ImplicitForCausalLM(ours).model.layer.backbone
    shared = {
        "vocab_size": ours.vocab_size, "hidden_size": ours.hidden_size, "tie_word_embeddings": True,
        "num_hidden_layers": ours.num_hidden_layers, "bos_token_id": ours.bos_token_id,
        "eos_token_id": ours.eos_token_id, "pad_token_id": None,
    }  # fmt: skip
    config: Any
    if ours.backbone["name"] == "llama":
        config = LlamaConfig(
            **shared, intermediate_size=body.layers[0].mlp.w1.out_features, rms_norm_eps=1e-5,
            num_attention_heads=ours.num_attention_heads,
            rope_parameters={"rope_type": "default", "rope_theta": body.rope_theta},
        )  # fmt: skip
    else:
        sizes = body.layers[0].mixer.sizes
        config = Mamba2Config(
            **shared, state_size=sizes.d_state, expand=sizes.inner // ours.hidden_size,
            head_dim=sizes.headdim, num_heads=sizes.heads, n_groups=sizes.n_groups, chunk_size=sizes.chunk,
        )  # fmt: skip
    set_seed(settings.seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    ImplicitForCausalLM.from_explicit(model, weight_norm=False).save_pretrained(folder)
    return model


def seconds_of_a_step(study: Study, stage: str) -> float:
    """The median time of a training step in a stage, measured once and saved in the folder of the study.

    Raises:
        ValueError: the saved time was measured with other settings or on another machine.
    """
    settings, file, setting = _timed(study, stage)
    if file.exists():
        found = read_json(file)
        if not {"setting", "seconds"} <= found.keys():
            raise ValueError(f"{file} holds no time of a step: remove it to measure again")
        # An older version may not have had a setting. What it did then is the default now.
        older = {name: value for name, value in defaults(RunSettings).items() if name in setting}
        before, now = dict(flat({**older, **found["setting"]})), dict(flat(setting))
        if different := changes(before, now):
            raise ValueError(
                f"{file} was measured with other settings ({'; '.join(different)}): repeat the options of "
                "the command time, such as --timed-search, or name another output"
            )
        return float(found["seconds"])
    logger.info("measuring the time of a step in stage %s", stage)
    _forget_compiled(settings)
    with tempfile.TemporaryDirectory() as scratch:
        args = arguments(settings, Path(scratch), progress=False)
        trainer = make_trainer(settings, open_data(settings), args)
        clock = _Clock(time.process_time if args.device.type == "cpu" else time.perf_counter)
        trainer.add_callback(clock)
        trainer.train()
    timed = clock.seconds[_WARM_UP:]
    seconds = statistics.median(timed)
    if not steady(timed):
        logger.warning(
            "the times of stage %s differ by more than %d %%. Perhaps other programs are running: stop them, "
            "remove %s and measure again", stage, 100 * _STEADY, file,
        )  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"seconds": seconds, "steps": clock.seconds, "setting": setting})
    del trainer, clock
    gc.collect()
    return seconds


def _timed(study: Study, stage: str) -> tuple[RunSettings, Path, dict[str, Any]]:
    """How the time of a step in a stage is measured.

    Returns the settings of the run, the file that keeps the time, and the settings that the time depends on.
    """
    settings = study.settings(
        [(stage, 1.0)], steps=_WARM_UP + study.timed_steps, learning_rate=1e-5, min_learning_rate=1e-5,
        seed=0, log_steps=10**6, eval_steps=10**6, save_steps=10**6,
    )  # fmt: skip
    if stage in ("free", "adaptive"):
        # A trained model needs more evaluations than a new one, so the number is fixed.
        (free,) = settings.stages or []
        number = study.timed_search or policies.create(free["convergence"]).max_iter
        free = {**free, "convergence": {"name": "fixed", "iterations": number}}
        free.pop("adaptive_budget", None)  # it changes the number
        settings = replace(settings, stages=[free])
    file = Path(study.output, "speed", f"{stage}.json")
    device = arguments(settings, file.parent, progress=False).device
    known = {name: value for name, value in settings.to_dict().items() if name not in _NO_MATTER}
    setting = {**known, "machine": describe_machine(device)}
    return settings, file, json.loads(json.dumps(setting))


def take_times(study: Study, stages: Collection[str], folders: Sequence[Path]) -> None:
    """Save the time of a step that every stage took in finished runs. Measured stages keep their time.

    The time of a stage is the mean over the runs in ``folders`` that have this stage.

    Raises:
        ValueError: no run has one of the stages; or a run is of another model, has other rows in a forward
            pass, or is from another machine.
    """
    places = {stage: _timed(study, stage)[1:] for stage in stages}
    found: dict[str, list[float]] = {stage: [] for stage, (file, _) in places.items() if not file.exists()}
    files = sorted({file for folder in folders for file in folder.rglob(results.FILE)})
    if not files:
        raise ValueError(f"no finished run in {', '.join(map(str, folders))}")
    for file in files:
        result = results.read(file)
        names = [name for name, _ in study.stages(result.form)]
        recorded, now = read_settings(file.parent), _timed(study, names[0])[2]
        rows = "per_device_batch_size"
        there = {"model": result.model, "machine": result.machine, rows: recorded.get(rows)}
        if different := changes(there, {"model": study.title, "machine": now["machine"], rows: now[rows]}):
            raise ValueError(
                f"the runs must be of this study and machine: {file.parent} ({'; '.join(different)})"
            )
        known = {f.name: recorded[f.name] for f in fields(RunSettings) if f.name in recorded}
        try:
            times = _run_times(read_record(file.parent)["log"], build(RunSettings, known))
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise ValueError(
                f"the settings or the log of the run in {file.parent} are damaged ({error!r}): train it again"
            ) from error
        for name, seconds in zip(names, times, strict=True):
            if name in found:
                found[name].append(seconds)
    if missing := [stage for stage, times in found.items() if not times]:
        raise ValueError(f"no finished run in {', '.join(map(str, folders))} has the stage {missing[0]}")
    for stage, times in found.items():
        file, setting = places[stage]
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"seconds": statistics.fmean(times), "runs": times, "setting": setting})


def steady(seconds: Sequence[float]) -> bool:
    """Whether the times of a step are nearly equal, without the tenth that is fastest or slowest."""
    ordered, outside = sorted(seconds), len(seconds) // 10
    return ordered[-1 - outside] - ordered[outside] <= _STEADY * statistics.median(seconds)


class _Clock(TrainerCallback):
    """Records the seconds between the ends of steps. Prevents evaluations and checkpoints.

    ``read``: function that reads a clock, in seconds.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self.read, self.seconds = read, list[float]()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.since = self.read()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self.read()
        self.seconds.append(now - self.since)
        self.since = now
        control.should_evaluate = control.should_save = False
