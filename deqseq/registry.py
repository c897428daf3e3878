"""Names for interchangeable parts: solvers, gradient strategies, convergence policies, backbones.

A part is given as an object, as a name (``"anderson"``), as a name with an argument
(``"torchdeq:anderson"``, ``"picard:0.7"``), or as a mapping ``{"name": "anderson", "memory": 3}``.
Names come from this package and from the entry points of any installed one, so a third party adds a part
without touching this repository::

    [project.entry-points."deqseq.solvers"]
    mann = "my_package:Mann"

Our own names come first: another package's part needs a name of its own.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """Builds the parts of one kind from names.

    Args:
        kind: the word for a part in error messages, e.g. ``"solver"``.
        group: the entry-point group in which other packages announce their parts.
        builtin: our own parts, ``name -> "module:attribute"``; imported on first use.
        base: the class of all parts.
        hint: text to append to the error for an object of another class.
    """

    def __init__(
        self, kind: str, group: str, builtin: Mapping[str, str], base: type[Part], hint: str = ""
    ) -> None:
        self.kind = kind
        self.base = base
        self.hint = hint
        self.group = group
        self._builtin = dict(builtin)

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._builtin, *(point.name for point in entry_points(group=self.group))})

    def lookup(self, name: str) -> type[Part]:
        """The class registered under ``name``.

        Raises:
            ValueError: an unknown name (the message lists the known ones), a name that several packages
                announce, or a part that cannot be imported.
        """
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            found: type[Part] = getattr(import_module(module), attribute)
            return found
        points: tuple[EntryPoint, ...] = tuple(entry_points(group=self.group, name=name))
        if not points:
            raise ValueError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        announced = ", ".join(f"{point.value} by {point.dist and point.dist.name}" for point in points)
        if len({point.value for point in points}) > 1:
            raise ValueError(f"{self.kind} {name!r} is announced more than once: as {announced}")
        try:
            loaded: type[Part] = points[0].load()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{self.kind} {name!r}, announced as {announced}, cannot be imported: {error}"
            ) from error
        return loaded

    def create(self, spec: Part | str | Mapping[str, Any]) -> Part:
        """Build a part from ``spec``; a part itself passes through.

        Raises:
            ValueError: unknown name, options that the part does not take, or something that is no part.
        """
        if isinstance(spec, (str, Mapping)):
            name, arguments, options = self._read(spec)
            factory = self._bound(name, arguments, options)
            try:
                return factory(*arguments, **options)
            except TypeError as error:
                raise self._misfit(name, arguments, options, error) from error
        if not isinstance(spec, self.base):
            raise ValueError(
                f"{self.kind} must be a {self.base.__name__}, a name or a mapping, got {spec!r}{self.hint}"
            )
        return spec

    def check(self, spec: str | Mapping[str, Any]) -> None:
        """Raise the error of :meth:`create` for a wrong name or option, without building the part."""
        self._bound(*self._read(spec))

    def takes(self, spec: str | Mapping[str, Any], option: str) -> bool:
        """Whether the part that ``spec`` names takes this option.

        Raises:
            ValueError: no part of that name.
        """
        return option in inspect.signature(self.lookup(self._read(spec)[0])).parameters

    def _read(self, spec: str | Mapping[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Name, positional arguments and options."""
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        if "name" not in options:
            raise ValueError(f"a {self.kind} given as a mapping needs a 'name'; got {options}")
        name, _, argument = str(options.pop("name")).partition(":")
        return name, (_value(argument),) if argument else (), options

    def _bound(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> type[Part]:
        factory = self.lookup(name)
        try:
            inspect.signature(factory).bind(*arguments, **options)
        except TypeError as error:
            raise self._misfit(name, arguments, options, error) from error
        return factory

    def _misfit(
        self, name: str, arguments: tuple[Any, ...], options: dict[str, Any], error: TypeError
    ) -> ValueError:
        given = [*map(repr, arguments), *(f"{key}={value!r}" for key, value in options.items())]
        return ValueError(
            f"{self.kind} {name!r} cannot be built from ({', '.join(given)}): {error}; "
            f"it takes {inspect.signature(self.lookup(name))}"
        )


def _value(text: str) -> Any:
    """The number that ``text`` is, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
