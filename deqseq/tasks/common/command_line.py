"""Command lines: a function is a command, its parameters are the arguments, its docstring is the help."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import docstring_parser
from jsonargparse import ArgumentParser, DefaultHelpFormatter

from deqseq.tasks.common.settings import add_parameters, one_line, plain, unknown_field, yaml_value

Command = Callable[..., Any]


class _Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of descriptions."""


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
    """Run a program; returns the exit status, as :func:`run` does.

    Args:
        prog: how the program is called.
        about: the description for ``--help``; the list of the commands follows it.
        commands: by name. The parameter ``settings``, if a command has one, gets the fields of a dataclass
            that the command line sets, by dotted names; its annotation is ``Annotated[dict, THE_CLASS]``.
        arguments: those of the command line by default.
        interrupted: what to say when Ctrl-C ends the program.
        default: the command to run where the first argument names none.
        log_level: lowest level of the log that is shown.
    """

    def work() -> None:
        given = list(sys.argv[1:] if arguments is None else arguments)
        command = commands.get(given[0]) if given else None
        if command is not None:
            execute(command, parse(parser(f"{prog} {given[0]}", command), command, given[1:]))
        elif default is not None:
            execute(default, parse(parser(prog, default, about), default, given))
        else:
            _choice(prog, about, commands).parse_args(given)

    return run(work, interrupted=interrupted, log_level=log_level)


def run(work: Callable[[], object], *, interrupted: str, log_level: int = logging.WARNING) -> int:
    """Do a program's work; returns the exit status.

    ``ValueError`` and ``OSError`` say what the user can correct: the program prints one line and ends with
    status 2. ``FloatingPointError``, numbers that are not finite, ends with one line and status 1. Any other
    exception is a fault of the program and shows its traceback.

    Args:
        work: what to do.
        interrupted: what to say when Ctrl-C ends the program, with status 130.
        log_level: lowest level of the log that is shown.
    """
    logging.basicConfig(level=log_level, format="%(message)s")
    try:
        work()
    except argparse.ArgumentError as error:
        _say(f"error: {one_line(error)}")
        return 2
    except (ValueError, OSError, FloatingPointError) as error:
        _say(f"error: {error}")
        return 1 if isinstance(error, FloatingPointError) else 2
    except KeyboardInterrupt:
        _say(f"interrupted; {interrupted}")
        return 130
    return 0


def _say(text: str) -> None:
    """Print to standard error; of several processes the first one does."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def execute(command: Command, values: Mapping[str, Any]) -> None:
    """Do what the command line says: call a function, or ``run`` an instance of a class."""
    made = command(**values)
    if isinstance(command, type):
        made.run()


def parser(prog: str, command: Command, about: str | None = None) -> ArgumentParser:
    """The parser of a command's parameters."""
    documented = docstring_parser.parse(command.__doc__ or "")
    said = "\n\n".join(filter(None, (documented.short_description, documented.long_description)))
    made = ArgumentParser(
        prog=prog, description=about or said, formatter_class=_Help, exit_on_error=False, allow_abbrev=False
    )
    add_parameters(made, command, skip=["settings"])
    if kind := _settings_of(command):
        add_parameters(made, kind, required=False)
    return made


def parse(made: ArgumentParser, command: Command, arguments: Sequence[str]) -> dict[str, Any]:
    """The arguments of a command, without those that have their defaults.

    Raises:
        argparse.ArgumentError, ValueError: wrong arguments.
    """
    flags = [flag for flag in made._option_string_actions if flag.startswith("--")]
    rest, dotted, words = [], {}, iter(arguments)
    kind = _settings_of(command)
    known = [f.name for f in fields(kind)] if kind else []
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
    found = made.parse_args(rest, defaults=False).as_dict()
    values = {name: plain(value) for name, value in found.items()}
    if kind:
        values["settings"] = {name: values.pop(name) for name in known if name in values} | dotted
    return values


def _settings_of(command: Command) -> Any:
    """The dataclass whose fields are options of the command."""
    hint = get_type_hints(command, include_extras=True).get("settings")
    return hint.__metadata__[0] if hint else None


def _choice(prog: str, about: str, commands: Mapping[str, Command]) -> ArgumentParser:
    summaries = {
        name: docstring_parser.parse(c.__doc__ or "").short_description for name, c in commands.items()
    }
    width = max(map(len, commands))
    lines = "\n".join(f"  {name:<{width}}  {' '.join((s or '').split())}" for name, s in summaries.items())
    made = ArgumentParser(
        prog=prog, description=f"{about}\n\n{lines}\n\n`... COMMAND --help` explains each.",
        formatter_class=_Help, exit_on_error=False,
    )  # fmt: skip
    made.add_argument("command", choices=list(commands), help="one of these")
    return made


def check_folder(path: Path) -> None:
    """Raise ``ValueError`` unless files can be written to the folder, or it can be made."""
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=nearest):  # permissions do not tell: root has all, even in /proc
            pass
    except OSError as error:
        raise ValueError(f"nothing can be written to the folder {nearest}: {error.strerror}") from None
