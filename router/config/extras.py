"""Parts of the router that need an extra of the package."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from router.errors import ConfigError, ConfigProblem


def import_extra(module: str, extra: str, location: str, value: str | None) -> ModuleType:
    """Import a part of the router that an option asks for.

    Args:
        location: The option's.
        value: The option's, as the error shows it; None where it may hold a secret.
    Raises:
        ConfigError: What the extra installs is missing.
    """
    try:
        return import_module(module)
    except ImportError as error:
        rule = f"it needs the extra {extra}: pip install '.[{extra}]' in kvroute's checkout"
        text = f"{error}; {rule}" if value is None else f"{value}; {rule} ({error})"
        raise ConfigError([ConfigProblem(location, text)]) from error
