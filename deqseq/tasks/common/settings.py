"""Builds settings from YAML files and command lines, and checks them with jsonargparse.

Settings are keyword-only dataclasses. The docstring of a class describes its fields under ``Args``. The
command line shows these descriptions as help.
"""

import difflib
import inspect
import math
import os
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import yaml
from jsonargparse import ArgumentParser, get_loader
from jsonargparse.typing import extend_base_type

if TYPE_CHECKING:
    PositiveInt = int
    NonNegativeInt = int
    Seed = int
    PositiveFinite = float
    NonNegativeFinite = float
    ClosedUnitInterval = float
    BelowOne = float
    Damping = float
else:

    def _whole(value: Any) -> int:
        number = Decimal(str(value))  # unlike int(), Decimal also reads the text "1e9"
        return int(number) if number == int(number) else math.nan

    def _number(rule: str, base: type, allowed: Callable[[Any], bool]) -> type:
        read = _whole if base is int else float

        def check(kind: type, value: Any) -> None:
            with suppress(ValueError, TypeError, ArithmeticError):
                if not isinstance(value, bool) and allowed(read(value)):
                    return
            raise ValueError(f"must be a {rule}, got {value}")

        return extend_base_type(rule, base, check, extra_attrs={"_type": read})

    PositiveInt = _number("whole number >= 1", int, lambda n: n >= 1)
    NonNegativeInt = _number("whole number >= 0", int, lambda n: n >= 0)
    Seed = _number("whole number in [0, 2**32)", int, lambda n: 0 <= n < 2**32)  # seeds that numpy accepts
    PositiveFinite = _number("positive, finite number", float, lambda x: 0 < x < math.inf)
    NonNegativeFinite = _number("finite number >= 0", float, lambda x: 0 <= x < math.inf)
    ClosedUnitInterval = _number("number in [0, 1]", float, lambda x: 0 <= x <= 1)
    BelowOne = _number("number in [0, 1)", float, lambda x: 0 <= x < 1)
    Damping = _number("number in (0, 1]", float, lambda x: 0 < x <= 1)

T = TypeVar("T")
Tree = dict[str, Any]


def build(kind: type[T], tree: Mapping[str, Any], prefix: str = "") -> T:
    """Make settings of class ``kind`` from the fields in ``tree``. In numeric fields, text becomes a number.

    Args:
        prefix: text that error messages show before the name of a field.

    Raises:
        ValueError: a field is unknown or missing, or a value has a wrong type or is out of range.
    """
    known = inspect.signature(kind).parameters
    for name in tree:
        if name not in known:
            raise ValueError(unknown_field(f"{prefix}{name}", [f"{prefix}{one}" for one in known]))
    for name, parameter in known.items():
        if parameter.default is parameter.empty and tree.get(name) is None:
            raise ValueError(f"{prefix}{name} is missing: {_descriptions(kind).get(name, '')}".rstrip(": "))
    return kind(**_checked(kind, tree, prefix))


def check_types(settings: Any) -> None:
    """Raise ``ValueError`` if a field of the dataclass ``settings`` does not fit its annotation."""
    for name, value in _checked(type(settings), vars(settings)).items():
        if value != (found := getattr(settings, name)):
            raise ValueError(f"{name} must be {value!r}, got {found!r}")


def defaults(kind: type) -> Tree:
    """The default values of the fields of dataclass ``kind`` that have one."""
    return {p.name: deepcopy(p.default) for p in _parameters(kind).values() if p.default is not p.empty}


def unknown_field(name: str, known: Sequence[str]) -> str:
    """The error message for a field that does not exist."""
    near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    return f"unknown field {name}" + (f"; did you mean {near[0]}?" if near else "")


def build_changed(kind: type[T], tree: Mapping[str, Any], changes: Mapping[str, Any]) -> T:
    """Make settings of class ``kind`` from the fields in ``tree``, after changing the fields in ``changes``.

    Nested fields have dotted names, such as ``stages.0.until``. If ``tree`` has ``backbone: llama``, changing
    ``backbone.n_head`` to 4 makes ``backbone: {name: llama, n_head: 4}``.
    """
    found = defaults(kind) | dict(tree)
    for name, value in changes.items():
        place: Any = found
        *path, last = name.split(".")
        for key in path:
            at = _key(place, key, name, found)
            if isinstance(place[at], str):
                place[at] = {"name": place[at]}
            place = place[at]
        place[last if isinstance(place, dict) else _key(place, last, name, found)] = value
    return build(kind, found)


def _key(place: Any, key: str, name: str, tree: Tree) -> Any:
    if isinstance(place, list):
        if key.isdigit() and int(key) < len(place):
            return int(key)
        raise ValueError(f"{name}: the list has entries 0 to {len(place) - 1}, got {key!r}")
    if isinstance(place, dict) and key in place:
        return key
    raise ValueError(unknown_field(name, [leaf for leaf, _ in flat(tree)]))


def flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name, such as ``stages.0.until``, and the value of every leaf of nested data.

    Nested data are mappings and lists. Empty mappings and empty lists are leaves.
    """
    if not isinstance(tree, (Mapping, list)) or not tree:
        yield name, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from flat(value, f"{name}.{key}" if name else str(key))


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name, the old and the new value of everything that differs between nested data.

    A name that only one mapping has counts as ``None`` in the other. For lists of different lengths, both
    whole lists are the values.
    """
    keys: Iterable[Any] = ()
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = {**old, **new}
        old, new = ({key: tree.get(key) for key in keys} for tree in (old, new))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        keys = range(len(old))
    elif old != new:
        yield name, old, new
    for key in keys:
        yield from differences(old[key], new[key], f"{name}.{key}" if name else str(key))


def yaml_value(text: str, what: str) -> Any:
    """Parse YAML. The text ``1e-3`` becomes a number. Error messages call the text ``what``.

    Raises ``ValueError`` if the text is not YAML, or sets a key twice.
    """
    try:
        _check_keys(yaml.compose(text), what)
        return get_loader("yaml")(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is not valid YAML: {' '.join(str(error).split())}") from error


def _check_keys(root: yaml.Node | None, what: str) -> None:
    """Raise ``ValueError`` if a mapping has a key twice. YAML would silently use the last value."""
    found, seen = [root], set[int]()  # a node may be inside itself
    while found:
        node = found.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            found += node.value
            continue
        names = set[tuple[str, str]]()
        for key, value in node.value:
            found.append(value)
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in names:
                raise ValueError(f"{what} sets {key.value} twice, again in line {key.start_mark.line + 1}")
            names.add((key.tag, key.value))


def read_yaml(source: str, shipped: Path) -> Tree:
    """Read the mapping in a YAML file. A ``~`` at the start of a value becomes the home folder.

    Args:
        source: a path that ends in .yaml or .yml, or the name of a file in ``shipped`` without its suffix.
        shipped: folder of the YAML files that come with the package.

    Raises:
        ValueError: the file does not exist, cannot be read, or contains no mapping.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        names = sorted(path.stem for path in shipped.glob("*.yaml"))
        if source not in names:
            what = f"{source!r} is not a YAML file (.yaml)" if path.exists() else f"there is no {source!r}"
            raise ValueError(f"{what}: name a YAML file, or one of {', '.join(names)}")
        path = shipped / f"{source}.yaml"
    try:
        tree = yaml_value(path.read_text(), f"the file {path}")
    except UnicodeDecodeError as error:
        raise ValueError(f"the file {path} is not UTF-8: {error.reason}") from error
    except OSError as error:
        raise ValueError(f"the file {path} cannot be read: {error.strerror}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"the file {path} must be a mapping of fields, got {tree!r}")
    return {
        name: os.path.expanduser(value) if isinstance(value, str) else value for name, value in tree.items()
    }


def add_parameters(
    parser: ArgumentParser, source: Callable[..., Any], required: bool = True, skip: Sequence[str] = ()
) -> None:
    """Add the parameters of a function or dataclass to a parser.

    The help of each parameter comes from the docstring of ``source``.

    Keyword-only parameters become options. All other parameters become positional arguments. A list parameter
    takes several values. ``--NAME`` without a value sets a bool to true. ``--no_NAME`` sets a bool to false,
    because :mod:`deqseq.tasks.common.command_line` replaces it by ``--NAME=false``.

    Args:
        required: whether the user must give all options that have no default.
        skip: names of parameters to leave out.
    """
    hints, descriptions = get_type_hints(source), _descriptions(source)
    for name, parameter in _parameters(source).items():
        default, kind = parameter.default, hints[name]
        if name in skip:
            continue
        options: Tree = {} if default is parameter.empty else {"default": default}
        item = _item_type(kind)
        said = descriptions.get(name, "")
        if kind is bool:
            options |= {"nargs": "?", "const": True}
            said += f"; --no_{name} turns it off" if default else ""
        elif item is not None:
            kind, options["nargs"] = item, "+"
        elif kind == str | None:
            kind = str  # keep the text "null" as text
        flags = list(dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"]))
        if parameter.kind is not parameter.KEYWORD_ONLY:
            flags = [name]
            if "default" in options:
                options["nargs"] = "*" if "nargs" in options else "?"
        elif required and default is parameter.empty:
            options["required"] = True
        parser.add_argument(*flags, type=kind, help=said, **options)


_RULES = {"bool": "true or false", "str": "text", "list": "a list", "dict": "a mapping"}


def one_line(error: Exception) -> str:
    """Shorten jsonargparse's error message about wrong arguments to one line."""
    drop = r"Does not validate against any.*?Errors:|Given value[^\n]*|Not of type [^:]*: "
    drop += r"|- Expected a <class 'NoneType'>[^\n]*"
    text = re.sub(drop, "", str(error), flags=re.S)
    lines = [line.strip().removeprefix("- ") for line in text.splitlines() if line.strip()]
    line = re.sub(r'^Parser key "(.*?)"( element \d+)?:;', r"\1\2:", "; ".join(lines))
    line = re.sub(
        r": Expected a typing\.Literal\[(.*?)\]\. Got value: (.*)", r" must be one of \1, got \2", line
    )
    line = re.sub(r", got (.*?); Expected a typing\.Literal\[(.*?)\]", r", or one of \2, got \1", line)
    kinds = re.findall(r"Expected a <class '(\w+)'>", line)
    if kinds and ": Expected a <class" in line:
        got = re.search(r"Got value: ([^;]*)", line)
        rules = " or ".join(_RULES.get(kind, kind) for kind in kinds)
        line = line.partition(": Expected")[0] + f" must be {rules}" + (f", got {got[1]}" if got else "")
    return line.replace(": must", " must")


@cache
def _parser(kind: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    add_parameters(parser, kind, required=False)
    return parser


def _checked(kind: type, tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Check the fields in ``tree`` and convert them to the types that class ``kind`` declares."""
    for name, hint in get_type_hints(kind).items():
        if name in tree and tree[name] is None and NoneType not in get_args(hint) and hint is not Any:
            raise ValueError(f"{prefix}{name} must not be null")
        if tree.get(name) is not None and _item_type(hint) and not isinstance(tree[name], list):
            raise ValueError(f"{prefix}{name} must be a list, got {tree[name]!r}")
    try:
        # A copy, because jsonargparse converts the entries of lists in place.
        found = _parser(kind).parse_object(deepcopy(dict(tree)), defaults=False).as_dict()
    except (ArgumentError, TypeError) as error:
        raise ValueError(prefix + one_line(error)) from error
    return {name: plain(value) for name, value in found.items()}


def plain(value: Any) -> Any:
    """Convert a number of a class in this module, such as ``PositiveInt``, to a plain int or float.

    Lists are converted entry by entry. Other values are returned unchanged.
    """
    if isinstance(value, list):
        return [plain(one) for one in value]
    base = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return value if base is None else base(value)


def _parameters(source: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function or dataclass. Calls default factories to get the default values."""
    found = dict(inspect.signature(source).parameters)
    for f in fields(source) if is_dataclass(source) else ():
        if f.default_factory is not MISSING:
            found[f.name] = found[f.name].replace(default=f.default_factory())
    return found


def _item_type(hint: Any) -> Any:
    """The item type X if ``hint`` is ``list[X]`` or ``list[X] | None``; otherwise ``None``.

    Also ``None`` for a list of dicts.
    """
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    first, *others = (kind for kind in kinds if kind is not NoneType)
    item = get_args(first)[0] if not others and get_origin(first) is list else None
    return None if get_origin(item) is dict else item


def _descriptions(source: Callable[..., Any]) -> dict[str, str]:
    """The description of every parameter, from the docstrings of a function, or of a class and its bases."""
    found: dict[str, str] = {}
    for documented in reversed(getattr(source, "__mro__", (source,))):
        for parameter in docstring_parser.parse(documented.__doc__ or "").params:
            found[parameter.arg_name] = " ".join((parameter.description or "").split())
    return found
