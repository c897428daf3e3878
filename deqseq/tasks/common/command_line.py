"""Makes command lines from functions. Parameters become arguments, and the docstring becomes the help."""

import argparse
import logging
import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from deqseq.tasks.common import processes
from deqseq.tasks.common.files import nearest_folder
from deqseq.tasks.common.settings import add_parameters, one_line, plain, unknown_field, yaml_value
from deqseq.tasks.common.termination import Terminated, terminable

Command = Callable[..., Any]
_HELP = {"-h", "--help"}


class _Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """A help formatter that keeps line breaks in descriptions, and shows classes by their names."""

    def _expand_help(self, action: argparse.Action) -> str:
        return re.sub(r"<class '(\w+)'>", r"\1", super()._expand_help(action) or "")


def main(
    prog: str,
    about: str,
    commands: Mapping[str, Command],
    arguments: Sequence[str] | None,
    *,
    interrupted: str,
    default: Command | None = None,
    log_level: int = logging.WARNING,
) -> int:
    """Run a program and return its exit status.

    The status is 0 after success. After these failures, the program prints one line and ends:

    - status 2 after ``ValueError`` or ``OSError``, whose cause the user can correct;
    - status 1 after ``FloatingPointError`` (numbers that are not finite), if another process of the run has
      been lost, or if a file is refused because it contains more than tensors;
    - status 130 after Ctrl-C, and 143 after SIGTERM.

    Any other exception is a bug and shows its traceback. If several processes fail, only the process that
    failed first prints its error, with its rank and host.

    Args:
        prog: the name of the program in its help.
        about: the description for ``--help``. A list of the commands is appended to it.
        commands: the commands by name. A command may have a parameter ``settings: Annotated[dict,
            A_DATACLASS]``. The fields of the dataclass then become arguments, and ``settings`` contains the
            values that the user has given, such as ``{"solver.name": "anderson"}`` for ``--solver.name
            anderson``. In ``Annotated[dict, A_DATACLASS, READ_RUN]``, the function ``READ_RUN`` returns the
            fields of the run that the argument ``run`` names. ``--help`` shows them as defaults.
        arguments: the arguments; ``sys.argv[1:]`` by default.
        interrupted: advice to print after an interruption, such as how to resume.
        default: the command to run if the first argument is not the name of a command.
        log_level: lowest level of the log messages that are shown.
    """
    logging.basicConfig(level=log_level, format="%(message)s")
    quiet_packages()
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = commands.get(words[0]) if words else None
    try:
        with terminable():
            if command is not None:
                execute(command, _parse(f"{prog} {words[0]}", command, words[1:]))
            elif default is not None:
                execute(default, _parse(prog, default, words, about))
            else:
                _choice(prog, about, commands).parse_args(words)
        return 0
    except processes.ElsewhereError as error:
        processes.record(str(error))
        return 2
    except argparse.ArgumentError as error:
        status, said = 2, f"error: {one_line(error)}"
    except (ValueError, OSError, FloatingPointError) as error:
        line = " ".join(part.strip() for part in str(error).splitlines() if part.strip())
        status, said = 1 if isinstance(error, FloatingPointError) else 2, f"error: {line}"
    except pickle.UnpicklingError as error:
        # Print only the name of the refused function: torch's own message advises to load the file anyway.
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({name[1]})" if name else ""
        status, said = 1, f"error: a file is refused, because it has more than tensors{what}"
    except RuntimeError as error:
        if not processes.lost(error):
            raise
        status, said = 1, f"error: another process of the run is gone; {interrupted}"
    except Terminated:
        status, said = 128 + signal.SIGTERM, f"terminated; {interrupted}"
    except KeyboardInterrupt:
        status, said = 130, f"interrupted; {interrupted}"
    processes.record(said)
    if processes.speaks():
        print(f"{processes.name()}{said}", file=sys.stderr)
    return status


def quiet_packages() -> None:
    """Make transformers and torchao show only errors, and no progress bars when models are loaded.

    Has an effect only before transformers is imported. Environment variables that the user has set stay.
    """
    for package in ("torchao", "torch.utils._pytree"):  # what torchao's import says concerns few commands
        logging.getLogger(package).setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def execute(command: Command, values: Mapping[str, Any]) -> None:
    """Call ``command`` with the arguments ``values``.

    If ``command`` is a class, also call the method ``run`` of the new instance.
    """
    made = command(**values)
    if isinstance(command, type):
        made.run()


def _parse(prog: str, command: Command, arguments: Sequence[str], about: str | None = None) -> dict[str, Any]:
    """Parse the arguments of a command. The result has no entries for arguments that the user left out."""
    hint = get_type_hints(command, include_extras=True).get("settings")
    kind, *read_run = hint.__metadata__ if hint else (None,)
    made = _parser(prog, command, kind, about, from_run=bool(read_run))
    known = [f.name for f in fields(kind)] if kind else []
    flags = [flag for flag in made._option_string_actions if flag.startswith("--")]
    rest, dotted, words = [], {}, iter(arguments)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--no_") and f"--{name[3:]}" in flags:
            rest.append(f"--{name[3:]}=false")
        elif kind and word.startswith("--") and name and f"--{name}" not in flags:
            first = name.replace("-", "_").partition(".")[0]
            if first not in known or "." not in name:
                raise ValueError(unknown_field(name, [*known, *(flag[2:] for flag in flags)]))
            value = text if equals else next(words, None)
            if value is None or (not equals and value.startswith("--")):
                raise ValueError(f"--{name} needs a value")
            dotted[name.replace("-", "_")] = yaml_value(value, f"the value of {name}")
        else:
            rest.append(word)
    if read_run and _HELP & {*rest} and (run := _named_run(command, kind, rest)):
        made.set_defaults({name: value for name, value in read_run[0](run).items() if name in known})
    found = made.parse_args(rest, defaults=False).as_dict()
    values = {name: plain(value) for name, value in found.items()}
    if kind:
        values["settings"] = {name: values.pop(name) for name in known if name in values} | dotted
    return values


def _parser(
    prog: str, command: Command, kind: type | None, about: str | None = None, required: bool = True,
    from_run: bool = False,
) -> ArgumentParser:  # fmt: skip
    """The parser of a command, whose settings are of class ``kind``.

    Args:
        required: whether the user must give all options that have no default.
        from_run: whether a run sets the settings that the user leaves out.
    """
    documented = docstring_parser.parse(command.__doc__ or "")
    said = "\n\n".join(filter(None, (documented.short_description, documented.long_description)))
    made = ArgumentParser(
        prog=prog, description=about or said, formatter_class=_Help, exit_on_error=False, allow_abbrev=False
    )
    add_parameters(made, command, required, skip=["settings"])
    if kind:
        add_parameters(made, kind, required=required and not from_run)
    return made


def _named_run(command: Command, kind: type | None, words: Sequence[str]) -> str | None:
    """The value of the argument ``run``; ``None`` if it is missing, or if an argument is wrong."""
    try:
        found = _parser("", command, kind, required=False).parse_args(
            [word for word in words if word not in _HELP], defaults=False
        )
    except argparse.ArgumentError:
        return None
    return found.get("run")


def _choice(prog: str, about: str, commands: Mapping[str, Command]) -> ArgumentParser:
    about += "\n"
    for name, command in commands.items():
        summary = docstring_parser.parse(command.__doc__ or "").short_description or ""
        about += f"\n  {name:<{max(map(len, commands))}}  {' '.join(summary.split())}"
    made = ArgumentParser(
        prog=prog, description=f"{about}\n\n`... COMMAND --help` explains each.",
        formatter_class=_Help, exit_on_error=False,
    )  # fmt: skip
    made.add_argument("command", choices=list(commands), help="one of these")
    return made


def refuse(why: str, **options: Any) -> None:
    """Raise ``ValueError`` if the user gave one of the ``options``. They have no effect here."""
    if given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]:
        raise ValueError(f"{why}: leave out {', '.join(given)}")


def check_png(option: str, path: Path) -> None:
    """Raise ``ValueError`` unless the PNG file ``path``, the value of ``option``, can be written."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"{option} must end in .png, got {path}")
    check_folder(path.parent, path.name)


def check_stem(option: str, path: Path) -> None:
    """Raise ``ValueError`` unless the files ``path``.json and ``path``.png of ``option`` can be written."""
    if path.name in ("", "..") or path.suffix.lower() in (".json", ".png"):
        raise ValueError(f"{option} must be the path of files without .json and .png, got {path}")
    check_folder(path.parent, f"{path.name}.json", f"{path.name}.png")


def check_folder(path: Path, *names: str) -> None:
    """Raise ``ValueError`` if the folder ``path`` cannot be made, or no files can be written to it.

    Also if it has a folder with one of the ``names``, which are the names of the files to write.
    """
    nearest = nearest_folder(path)
    for file in (path / name for name in names):
        if file.is_dir():
            raise ValueError(f"{file} is a folder, and this command writes a file of this name")
    try:
        with tempfile.TemporaryFile(dir=nearest):  # write a file, because root passes every permission check
            pass
    except OSError as error:
        raise ValueError(f"nothing can be written to the folder {nearest}: {error.strerror}") from None
