"""Checks that the compiled core is installed, and that its version fits these sources."""

from __future__ import annotations

from importlib import import_module

from router.errors import RouterError

CORE_VERSION = 49
"""The version of the module's interface, also in core/binding/module.cpp."""


class CoreUnavailable(RouterError):
    """The router cannot run without it."""


def check_core() -> None:
    """Raise `CoreUnavailable` if the core is missing or of another version."""
    try:
        core = import_module("router._core")
    except ImportError as error:
        raise CoreUnavailable(
            f"its compiled core cannot be loaded ({error}); it is built when kvroute is installed "
            "(pip install, or make native), for the Python that installs it: install kvroute again"
        ) from error
    if core.core_version != CORE_VERSION:
        raise CoreUnavailable(
            f"{core.__file__} is a compiled core of version {core.core_version}: it must be "
            f"{CORE_VERSION}; build it again (make native, or pip install)"
        )


check_core()
