"""Names for interchangeable parts: solvers, guesses, gradient strategies, convergence policies, backbones.

A part is given as an object, as a name (``"anderson"``), as a name with an argument
(``"torchdeq:anderson"``, ``"picard:0.7"``), or as a mapping ``{"name": "anderson", "memory": 3}``.
Names come from this package, from :func:`register` and from the entry points of installed packages. Another
package adds a part with an entry point::

    [project.entry-points."deqseq.solvers"]
    mann = "my_package:Mann"

A name of this package always means this package's part, so other packages must choose new names.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from keyword import iskeyword
from typing import Any, Generic, TypeVar

from deqseq.checks import shown

Part = TypeVar("Part")


class Registry(Generic[Part]):
    """Builds the parts of one kind from names.

    Args:
        kind: the word for a part in error messages, e.g. ``"solver"``.
        group: the entry-point group in which other packages register their parts.
        builtin: maps the name of each part of this package to ``"module:attribute"``. A part is imported on
            first use.
        base: the base class of all parts.
        hint: text at the end of the error message for an object of a wrong class.
    """

    def __init__(
        self, kind: str, group: str, builtin: Mapping[str, str], base: type[Part], hint: str = ""
    ) -> None:
        self.kind = kind
        self.base = base
        self.hint = hint
        self.group = group
        self._builtin = dict(builtin)
        self._registered: dict[str, type[Part]] = {}
        _registries.append(self)

    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted({*self._builtin, *self._registered, *self._installed()})

    def register(self, name: str, part: type[Part]) -> None:
        """Let ``name`` mean the class ``part`` in this process, as :func:`register` describes."""
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            rule = "must be a Python identifier and no keyword"
            raise ValueError(f"the name of a {self.kind} {rule}, got {shown(name)}")
        if name in self._builtin or name in self._installed():
            raise ValueError(f"{self.kind} {name!r} exists already: choose another name")
        self._registered[name] = part

    def _installed(self) -> set[str]:
        """The names in installed packages."""
        return {point.name for point in entry_points(group=self.group)}

    def lookup(self, name: str) -> type[Part]:
        """The class registered under ``name``.

        Raises:
            ValueError: the name is unknown (the message lists the known names), the name has several
                different entry points, or the part cannot be imported.
        """
        if name in self._builtin:
            module, _, attribute = self._builtin[name].partition(":")
            found: type[Part] = getattr(import_module(module), attribute)
            return found
        if name in self._registered:
            return self._registered[name]
        points: tuple[EntryPoint, ...] = tuple(entry_points(group=self.group, name=name))
        if not points:
            raise ValueError(
                f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}; deqseq.register adds a "
                f"name, and other packages add names as entry points of the group {self.group!r}"
            )
        registered = ", ".join(f"{point.value} by {point.dist and point.dist.name}" for point in points)
        if len({point.value for point in points}) > 1:
            raise ValueError(f"{self.kind} {name!r} is registered more than once: as {registered}")
        try:
            loaded: type[Part] = points[0].load()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{self.kind} {name!r}, registered as {registered}, cannot be imported: {error}"
            ) from error
        return loaded

    def create(self, spec: Part | str | Mapping[str, Any]) -> Part:
        """Build a part from a name or a mapping. If ``spec`` is already a part, return it unchanged.

        Raises:
            ValueError: the name is unknown, ``spec`` has an option that the part does not take, or ``spec``
                is an object of a wrong class.
        """
        if isinstance(spec, (str, Mapping)):
            name, arguments, options = self._read(spec)
            factory = self._bound(name, arguments, options)
            try:
                return factory(*arguments, **options)
            except TypeError as error:
                raise self._misfit(name, arguments, options, error) from error
        if not isinstance(spec, self.base):
            rule = f"must be a {self.base.__name__}, a name or a mapping"
            compiled = isinstance(getattr(spec, "_orig_mod", None), self.base)  # the result of torch.compile
            hint = "; instead of torch.compile, use layer.backbone.compile()" if compiled else self.hint
            raise ValueError(f"{self.kind} {rule}, got {shown(spec)}{hint}")
        return spec

    def pair(self, specs: Any) -> tuple[Part, Part]:
        """Return the part for training and the part for evaluation.

        ``specs`` is a tuple or list of two specifications, as for :meth:`create`. If it is a single
        specification, both parts are the same object.

        Raises:
            ValueError: the tuple or list does not have two entries, or :meth:`create` refuses an entry.
        """
        if not isinstance(specs, (tuple, list)):
            part = self.create(specs)
            return part, part
        if len(specs) != 2:
            raise ValueError(
                f"{self.kind} takes one value or a pair (training, evaluation), got a list of {len(specs)}"
            )
        return self.create(specs[0]), self.create(specs[1])

    def check(self, spec: str | Mapping[str, Any]) -> None:
        """Check the name and options of ``spec`` without building the part.

        Raises:
            ValueError: the name is unknown, or the part does not take the given options.
        """
        self._bound(*self._read(spec))

    def takes(self, spec: str | Mapping[str, Any], option: str) -> bool:
        """Whether the part that ``spec`` names takes ``option``.

        Raises:
            ValueError: the name is unknown.
        """
        return option in inspect.signature(self.lookup(self._read(spec)[0])).parameters

    def _read(self, spec: str | Mapping[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Split ``spec`` into name, positional arguments and options."""
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        if "name" not in options:
            raise ValueError(f"a {self.kind} given as a mapping needs a 'name'; got {options}")
        if not isinstance(options["name"], str):
            raise ValueError(f"the name of a {self.kind} must be text, got {options['name']!r}")
        if options["name"].lstrip().startswith("["):
            raise ValueError(f"a single {self.kind} is needed here, got the list {options['name']}")
        if options["name"].lstrip().startswith("{"):
            raise ValueError(f"{self.kind} {options['name']!r} is neither a name nor a mapping in YAML")
        name, _, argument = options.pop("name").partition(":")
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


_registries: list[Registry[Any]] = []


def register(name: str, part: type) -> None:
    """Give a class of your own a name: a solver, guess, gradient strategy, convergence policy or backbone.

    The name then works wherever a part is named, for example in :class:`~deqseq.causal_lm.ImplicitConfig`.
    The base class of ``part`` decides its kind. A second call with the same name replaces the class.

    The name is known only in this process. A process that loads a saved model must register it too. The
    commands of this library know only the names of this library and of installed packages (entry points).

    Args:
        name: a Python identifier that is no keyword, such as ``"momentum"``.
        part: a subclass of :class:`~deqseq.Solver`, :class:`~deqseq.Guess`, :class:`~deqseq.Backbone`,
            :class:`~deqseq.GradientStrategy` or :class:`~deqseq.ConvergencePolicy`.

    Raises:
        ValueError: ``part`` is something else, is of two kinds, or is abstract; ``name`` is no identifier or
            a keyword, or belongs to this library or to an installed package.
    """
    fitting = [one for one in _registries if isinstance(part, type) and issubclass(part, one.base)]
    if len(fitting) != 1:
        bases = ", ".join(registry.base.__name__ for registry in _registries)
        several = f", which is {len(fitting)} of them: split it" if fitting else ""
        raise ValueError(f"a part must be a subclass of one of {bases}, got {shown(part)}{several}")
    if missing := sorted(getattr(part, "__abstractmethods__", ())):
        raise ValueError(f"{part.__name__} cannot be built, because it does not define {', '.join(missing)}")
    fitting[0].register(name, part)


def _value(text: str) -> Any:
    """Convert ``text`` to an int or float. If it is not a number, return it unchanged."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
