"""Functions that all benchmark scripts share.

They parse arguments, measure time and memory, print tables, write results, and resume measurements that were
interrupted.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm.auto import tqdm

from deqseq.tasks.common.command_line import quiet_packages
from deqseq.tasks.common.files import write_json
from deqseq.tasks.common.results import describe_machine, provenance

Row = dict[str, Any]


def parser(text: str | None, output: str, device: str | None = None) -> argparse.ArgumentParser:
    """Make a parser with the two options of all benchmark scripts: ``--device`` and ``--output``.

    Args:
        text: the docstring of the script, shown by ``--help``.
        output: default of ``--output``, a file or folder in ``runs/benchmarks``.
        device: default of ``--device``. ``None`` means a GPU if there is one, else the CPU.
    """
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--device", choices=("cpu", "cuda"), default=device, help=f"default: {device}")
    path = Path("runs/benchmarks", output)
    made.add_argument("--output", type=Path, default=path, help=f"where to write results (default: {path})")
    return made


def comparison_parser(text: str | None, output: str) -> argparse.ArgumentParser:
    """Make a parser for a script that compares solvers or gradients on trained models.

    The parser has the options of :func:`parser`, and options for the models and the size of a batch.
    """
    made = parser(text, output)
    made.add_argument("--quick", action="store_true", help="smaller models, fewer rows")
    made.add_argument("--batch", type=int, help="number of sequences")
    made.add_argument("--length", type=int, help="tokens per sequence")
    made.add_argument("--models", type=Path, default=Path("runs/benchmarks/models"),
                      help="folder of the models that this script trains")  # fmt: skip
    return made


def parse(made: argparse.ArgumentParser, **defaults: tuple[Any, Any]) -> argparse.Namespace:
    """Parse the command line.

    ``defaults`` maps the name of an option to two values: the default without ``--quick``, and the default
    with ``--quick``.
    """
    options = made.parse_args()
    for name, (full, quick) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    return options


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main`` and exit with the status that it returns.

    If ``main`` raises ``ValueError``, print one line and exit with status 2.

    ``main`` should parse the arguments before it imports transformers, because the import takes seconds.
    """
    quiet_packages()
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def stopwatch(function: Callable[[], Any], device: str) -> float:
    """Seconds that ``function`` takes, including the work that it queues on the device."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def time_over(
    bare: Callable[[], Any], function: Callable[[], Any], device: str, rounds: int
) -> tuple[float, float]:
    """Call ``bare`` and ``function`` once in every round, and time both.

    Returns two medians over the rounds: the seconds of ``function``, and the ratio of the seconds of
    ``function`` to the seconds of ``bare``.
    """
    bare(), function()
    pairs = [(stopwatch(bare, device), stopwatch(function, device)) for _ in range(rounds)]
    ratios = [seconds / alone for alone, seconds in pairs]
    return statistics.median(seconds for _, seconds in pairs), statistics.median(ratios)


def family(name: str) -> str:
    """The name of a solver or gradient strategy without its options.

    For example, ``anderson-5`` and ``anderson:5`` both become ``anderson``.
    """
    return name.replace(":", "-").partition("-")[0]


def relative_distance(z: Tensor, reference: Tensor) -> Tensor:
    """The relative distance ||z - reference|| / ||reference|| of every token, in float64.

    Takes tensors of B sequences with L tokens of width D, (B, L, D). Returns a tensor (B, L).
    """
    z, reference = z.double(), reference.double()
    return torch.linalg.vector_norm(z - reference, dim=-1) / torch.linalg.vector_norm(reference, dim=-1)


def peak_mib(function: Callable[[], Any], device: str) -> float | None:
    """Call ``function`` once. Returns the peak GPU memory of the call in MiB; ``None`` on the CPU."""
    if device == "cpu":
        function()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def machine_name(device: str) -> str:
    """The name of the GPU or the processor."""
    return describe_machine(torch.device(device))


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows as a table. Every key that occurs in a row gets a column."""
    cells = [{name: _cell(value) for name, value in row.items()} for row in rows]
    text = tabulate(cells, "keys", "plain", stralign="right", missingval="-", disable_numparse=True)
    print(title, text, sep="\n", flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if value and not 1e-2 <= abs(value) < 1e5 else f"{value:.3f}"
    return "-" if value is None else str(value)


def write_results(file: Path, options: argparse.Namespace, **results: Any) -> None:
    """Write a JSON file with the settings, the machine, the versions, the date and ``results``."""
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"settings": settings, **provenance(torch.device(options.device)), **results})
    print(f"wrote {file}")


def report(title: str, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Print the rows as a table and write them to ``--output``."""
    print_table(f"{title}, {machine_name(options.device)}", rows)
    write_results(options.output, options, rows=rows)


def checksum(model: torch.nn.Module, *inputs: Tensor) -> str:
    """Twelve hexadecimal digits that identify a model's weights and its inputs."""
    digest = hashlib.sha256()
    for values in (*model.state_dict().values(), *inputs):
        digest.update(str((values.dtype, tuple(values.shape))).encode())
        digest.update(values.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def measure_grid(
    file: Path, keys: Sequence[Mapping[str, Any]], measure: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
) -> list[Row]:  # fmt: skip
    """Measure one row for every key, and return all rows. A row is ``{**key, **measure(key)}``.

    Each row is appended to ``file`` (JSON lines) as soon as it is measured. Rows that are already in the file
    are not measured again. If a measurement fails, the entry ``problem`` of the returned row is the error.
    Such a row is not written to the file, so the next run measures it again.

    Args:
        settings: what the rows depend on besides their keys, as JSON types. It is written to a file beside
            ``file``.

    Raises:
        ValueError: a line of the file is not a row, or its rows were measured with other settings.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if settings is not None:
        _check_settings(file, dict(settings))
    known, rows = _read_rows(file), []
    for key in (bar := tqdm(keys, unit="row")):
        bar.set_postfix_str(" ".join(map(str, key.values())))
        row = next((row for row in known if key.items() <= row.items()), None)
        if row is None:
            try:
                row = {**key, **measure(key)}
            except (RuntimeError, ValueError, ImportError, ArithmeticError) as error:
                row = {**key, "problem": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            else:
                with file.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
        rows.append(row)
    return rows


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    """Write the settings to a file beside ``file``, or compare them with those in the file."""
    beside = file.with_suffix(".settings.json")
    if not beside.exists():
        beside.write_text(json.dumps(settings))
    before = json.loads(beside.read_text())
    if before != settings:
        names = [name for name in settings if before.get(name) != settings[name]]
        raise ValueError(
            f"the rows in {file} were measured with another {', '.join(names)}: choose another --output"
        )


def _read_rows(file: Path) -> list[Row]:
    """Read the rows of ``file``. If the last line of the file is incomplete, remove this line."""
    file.touch()
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(dict(json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file} cannot be read, line {number} is not a row: {error}") from error
    os.truncate(file, len(whole))
    return rows
