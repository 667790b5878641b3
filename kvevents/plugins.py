"""Implementations by name: the built-in ones, and plug-ins that other packages offer.

A plug-in is an entry point, so installing its package is enough to use it:

    [project.entry-points."kvroute.policies"]
    cheapest = "my_package:CheapestPolicy"

Event publishers (`kvevents.publisher`), scoring policies (`router.policies.policies`), offload
tiers (`offload.tiers.creation`) and the CPU tier's eviction policies (`offload.cpu.policies`) are
found this way. Each has a group of its own, and arguments of its own that a plug-in is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, ParamSpec, TypeVar

from kvevents.errors import PlugInError

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


@dataclass(eq=False, repr=False)
class PlugIns(Generic[Arguments, Made]):
    """Everything of one kind that can be made by name; nothing is imported before `make`.

    A built-in name wins over a plug-in of the same name: installing a package must not change what
    an existing configuration means.
    """

    group: str
    """The entry points' group."""
    setting: str
    """The configuration key that holds the name. Error messages begin with it."""
    built_in: Mapping[str, Callable[Arguments, Made]]
    methods: Sequence[str]
    """Names of the methods that a plug-in's object must have."""
    error: type[Exception] = PlugInError
    """Raised for an unknown name and for a plug-in that cannot be used."""

    def __post_init__(self) -> None:
        self._factories = dict(self.built_in)

    def names(self) -> list[str]:
        """All names that `make` knows: built-in and registered ones, then plug-ins."""
        plug_ins = {entry.name for entry in entry_points(group=self.group)}
        return [*self._factories, *sorted(plug_ins - self._factories.keys())]

    def register(self, name: str, factory: Callable[Arguments, Made]) -> None:
        """Add a factory in this process, without an entry point.

        Args:
            factory: Called with the arguments of `make`.

        Raises:
            ValueError: The name is taken.
        """
        if name in self._factories:
            raise ValueError(f"{self.setting}: {name!r} is registered already")
        self._factories[name] = factory

    def make(self, name: str, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        """Call the factory of that name. The factory's own errors go through.

        Args:
            name: A built-in or registered name, or that of a plug-in.

        Raises:
            PlugInError: The name is unknown or two packages offer it, or its plug-in cannot be
                imported, is not callable, or makes something without the methods needed. Instead
                of `PlugInError` this may be the class passed as *error*.
        """
        factory = self._factories.get(name)
        if factory is not None:
            return factory(*args, **kwargs)
        entry = self._entry_point(name)
        made = self._load(entry)(*args, **kwargs)
        self._check_methods(entry, made)
        return made

    def _entry_point(self, name: str) -> EntryPoint:
        found = {entry.value: entry for entry in entry_points(group=self.group, name=name)}
        if not found:
            raise self.error(f"{self.setting}: {name[:40]!r} is unknown; {self._hint(name)}")
        if len(found) > 1:
            offers = " and ".join(map(_origin, sorted(found.values(), key=lambda one: one.value)))
            raise self.error(
                f"{self.setting}: {name!r} is offered by {offers}; uninstall all but one"
            )
        return next(iter(found.values()))

    def _hint(self, name: str) -> str:
        known = {each.lower(): each for each in self.names()}
        close = get_close_matches(name.lower(), known, 1)
        guess = f"did you mean {known[close[0]]}? " if close else ""
        return f"{guess}known: {', '.join(known.values())}"

    def _load(self, entry: EntryPoint) -> Callable[Arguments, Made]:
        try:
            factory: Callable[Arguments, Made] = entry.load()
        except Exception as error:  # any error of a foreign module's import
            raise self.error(f"{self._place(entry)} cannot be imported: {error}") from error
        if not callable(factory):
            raise self.error(
                f"{self._place(entry)} is {type(factory).__name__}; it must be callable"
            )
        return factory

    def _check_methods(self, entry: EntryPoint, made: Made) -> None:
        missing = [name for name in self.methods if not callable(getattr(made, name, None))]
        if missing:
            raise self.error(
                f"{self._place(entry)} made {type(made).__name__}, which lacks {', '.join(missing)}"
            )

    def _place(self, entry: EntryPoint) -> str:
        return f"{self.setting}: the plug-in {entry.name!r}, {_origin(entry)},"


def _origin(entry: EntryPoint) -> str:
    """`my_package:CheapestPolicy of my-package 1.0`."""
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"{entry.value}{package}"
