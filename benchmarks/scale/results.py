"""Reads the records of benchmarks/scaling.py, and makes tables and the figure from them."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from scale.launch import RESULT, Checkpoint, Run, read_records
from tabulate import tabulate

from deqseq.tasks.common.figures import save_figure
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import provenance
from deqseq.tasks.common.runs import read_json, read_record
from deqseq.tasks.common.seals import SEAL
from deqseq.tasks.pretraining.run_files import load_run
from deqseq.tasks.pretraining.watch import Flops, peak_flops

Row = dict[str, Any]


def stages(run: Run, names: Sequence[str], warm_up: int) -> list[Row]:
    """One row for each stage of a finished run.

    Leaves out the first ``warm_up`` steps of every stage, and the profiled steps, except for the parts of a
    step. ``waiting``: mean seconds in which a GPU communicates while the slowest rank still computes.
    """
    settings = load_run(run.name, run.fields)
    flops = Flops(settings.config(), settings.length)
    peak = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    ranks = [record["steps"] for record in read_records(run)]
    rows = []
    begin = 0
    for name, end in zip(names, settings.stage_ends, strict=True):
        both = list(zip(*(steps[begin:end] for steps in ranks), strict=True))  # for every step, its ranks
        timed = [step for step in both[warm_up:] if step[0]["step"] not in run.profiled]
        every = [step[0]["seconds"] for step in timed]
        seconds = fmean(every)
        each = [[sum(rank["evaluations"]) for rank in step] for step in timed]
        solves = len(timed[0][0]["evaluations"])
        evaluations = fmean(map(fmean, each)) / solves
        row = {
            "stage": name, "seconds": seconds, "seconds_of_steps": every,
            "tokens_per_second": settings.batch_tokens / seconds, "evaluations": evaluations,
            "evaluations_of_the_slowest_rank": fmean(map(max, each)) / solves,
            "memory_gib": max(rank.get("memory_gib", 0.0) for step in both for rank in step) or None,
        }  # fmt: skip
        if peak:
            rows_of_a_gpu = settings.rows_per_step / run.gpus
            done = rows_of_a_gpu * flops.step(evaluations, timed[0][0]["with_graph"])
            row["mfu"] = done / seconds / peak
        if profiled := [step for step in both if "parts" in step[0]]:
            kinds = profiled[0][0]["parts"]
            row["parts"] = {
                kind: fmean(r["parts"][kind] for step in profiled for r in step) for kind in kinds
            }
            least = [min(rank["parts"]["communicating"] for rank in step) for step in profiled]
            row["parts"]["waiting"] = row["parts"]["communicating"] - fmean(least)
        rows.append(row)
        begin = end
    return rows


def of_checkpoint(checkpoint: Checkpoint) -> Row:
    """The size of a checkpoint, how long training waited for it, and after how long it was complete."""
    run, step, folder = checkpoint.run, checkpoint.step, checkpoint.path
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != SEAL]
    first = min(file.stat().st_mtime for file in files)
    (waited,) = (s["seconds_of_saving"] for s in read_records(run)[0]["steps"] if s["step"] == step)
    return {
        "gib": sum(file.stat().st_size for file in files) / 2**30, "seconds_of_waiting": waited,
        "seconds_to_the_seal": (folder / SEAL).stat().st_mtime - first,
    }  # fmt: skip


def losses(run: Run) -> dict[int, float]:
    """The losses in the log of a finished run, by step."""
    return {line["step"]: line["loss"] for line in read_record(run.folder / "run")["log"] if "loss" in line}


def largest_difference(run: Run, reference: Run, after: int) -> float:
    """The largest difference between the losses of two runs after a step."""
    mine, theirs = losses(run), losses(reference)
    return max(abs(mine[step] - theirs[step]) for step in theirs if step > after)


def write(run: Run, **result: Any) -> None:
    """Write the result of a run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = {**run.title, "model": run.name, "gpus": run.gpus, **provenance(device)}
    write_json(run.folder / RESULT, {**head, **result})


def collect(folder: Path) -> list[Row]:
    """All results in a folder. Raises ``ValueError`` if there are none."""
    found = [read_json(file) for file in sorted(folder.rglob(RESULT))]
    if not found:
        raise ValueError(f"{folder} has no results: run the commands speed, sharded or kill first")
    return found


def tables(results: Sequence[Row]) -> dict[str, str]:
    """Markdown tables by title."""
    made = {
        "Tokens per second": _speed(results, "ddp"),
        "Parts of a step": _parts(results),
        "Sharded models": _speed(results, "fsdp2"),
        "Sharded checkpoints": [
            {"model": r["model"], "saved on": r["gpus"], "GiB": f"{r['checkpoint']['gib']:.1f}",
             "training waits, s": f"{r['checkpoint']['seconds_of_waiting']:.1f}",
             "complete after, s": f"{r['checkpoint']['seconds_to_the_seal']:.1f}"}
            for r in results if r["kind"] == "fsdp2" and r.get("checkpoint")
        ],
        "Continued on other numbers of GPUs": [
            {"model": r["model"], "saved on": r["saved_on"], "continued on": r["gpus"],
             "until the first step, s": f"{r['seconds_to_start']:.1f}",
             "a new run, s": f"{r['seconds_to_start_anew']:.1f}",
             "steps": r["steps"], "largest difference of a loss": f"{r['largest_difference']:.1e}"}
            for r in results if r["kind"] == "continued"
        ],
        "A killed rank": [
            {"model": r["model"], "GPUs": r["gpus"], "killed": r["killed"],
             "all ended after, s": f"{r['seconds_to_end']:.1f}",
             "resumed from step": r["resumed_from"],
             "largest difference of a loss": f"{r['largest_difference']:.1e}",
             "of two whole runs": f"{r['largest_difference_without_a_kill']:.1e}"}
            for r in results if r["kind"] == "kill"
        ],
    }  # fmt: skip
    return {
        title: tabulate(rows, "keys", "github", stralign="right", disable_numparse=True)
        for title, rows in made.items() if rows
    }  # fmt: skip


def _cases(results: Sequence[Row], kind: str) -> dict[tuple[str, str], dict[int, list[Row]]]:
    """For every model and stage, the rows of its runs, by the number of GPUs."""
    found: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for result in sorted((r for r in results if r["kind"] == kind), key=lambda r: (r["model"], r["gpus"])):
        for stage in result["stages"]:
            case = found.setdefault((result["model"], stage["stage"]), {})
            case.setdefault(result["gpus"], []).append(stage)
    return found


def _speed(results: Sequence[Row], kind: str) -> list[Row]:
    """One row for each model, stage and number of GPUs. ``ratio``: as in :func:`_ratios`."""
    rows = []
    for (model, stage), by_gpus in _cases(results, kind).items():
        ratios = _ratios(by_gpus)
        for gpus, found in by_gpus.items():
            rows.append({
                "model": model, "stage": stage, "GPUs": gpus,
                "tokens/s": ", ".join(f"{row['tokens_per_second']:,.0f}" for row in found),
                "ratio": ", ".join(f"{ratio:.2f}" for ratio in ratios[gpus]) if gpus in ratios else "-",
                "MFU": f"{fmean(row['mfu'] for row in found):.2f}" if "mfu" in found[0] else "-",
                "GiB": f"{max(row['memory_gib'] for row in found):.1f}" if found[0]["memory_gib"] else "-",
                "evaluations": f"{fmean(row['evaluations'] for row in found):.1f}",
                "of the slowest": f"{fmean(r['evaluations_of_the_slowest_rank'] for r in found):.1f}",
            })  # fmt: skip
    return rows


def _ratios(by_gpus: dict[int, list[Row]]) -> dict[int, list[float]]:
    """The tokens per second of every run, divided by the mean on the fewest GPUs.

    Leaves out numbers of GPUs on which a run has another number of evaluations in a step (by more than 1 %).
    """
    least = by_gpus[min(by_gpus)]
    alone, needed = (fmean(row[name] for row in least) for name in ("tokens_per_second", "evaluations"))
    return {
        gpus: [row["tokens_per_second"] / alone for row in rows]
        for gpus, rows in by_gpus.items()
        if all(abs(row["evaluations"] - needed) <= 0.01 * needed for row in rows)
    }


def _parts(results: Sequence[Row]) -> list[Row]:
    rows = []
    for (model, stage), by_gpus in _cases(results, "ddp").items():
        for gpus, found in by_gpus.items():
            parts = [row["parts"] for row in found if "parts" in row]
            if parts:
                mean = {kind: 1e3 * fmean(part[kind] for part in parts) for kind in parts[0]}
                rows.append({
                    "model": model, "stage": stage, "GPUs": gpus,
                    **{f"{kind}, ms": f"{value:.1f}" for kind, value in mean.items()},
                })  # fmt: skip
    return rows


def save(results: Sequence[Row], output: Path) -> list[Path]:
    """Write ``output.json`` with all results and tables, and the figure ``output.png``. Returns the files."""
    file, figure = (output.with_name(output.name + suffix) for suffix in (".json", ".png"))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"tables": tables(results), "results": list(results)})
    drawn = _cases(results, "ddp") and save_figure(figure, partial(_draw, _cases(results, "ddp")))
    return [file, figure] if drawn else [file]


def _draw(cases: dict[tuple[str, str], dict[int, list[Row]]], axes: Sequence[Any]) -> None:
    """Draw the tokens per second of every case, relative to the fewest GPUs, against the number of GPUs."""
    (axis,) = axes
    most = max(max(by_gpus) for by_gpus in cases.values())
    axis.plot([1, most], [1, most], "--", color="grey", linewidth=1, label="proportional")
    for (model, stage), by_gpus in cases.items():
        least = min(by_gpus)
        ratios = {gpus: least * fmean(found) for gpus, found in _ratios(by_gpus).items()}
        label = f"{model}, {stage}"
        axis.plot(list(ratios), list(ratios.values()), "o-", markersize=3, linewidth=1, label=label)
    axis.set(xlabel="GPUs", ylabel="tokens per second, relative to one GPU")
    axis.legend()


def read(folder: Path) -> Any:
    """The result in the folder of a run, or ``None``."""
    return json.loads((folder / RESULT).read_text()) if (folder / RESULT).exists() else None
