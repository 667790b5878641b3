"""Checks whether the plug-in knows this vLLM, by its version and by what is to be replaced."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

OLDEST, NEWEST = (0, 29), (0, 33)


class UnknownVllm(Exception):
    """Something is not as in any version that the plug-in was tested with."""


def check_version(version: str) -> tuple[int, int]:
    """Return the release that a version belongs to.

    Args:
        version: Such as `0.33.0`, `0.32.0+cpu` or `0.31.1rc2`.

    Raises:
        UnknownVllm: It lies outside of those known, or is no version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else None
    if release is None or not OLDEST <= release <= NEWEST:
        known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        raise UnknownVllm(f"its version is {version[:40]}; known are {known}")
    return release


def check_parameters(function: Callable[..., Any], *known: str) -> str:
    """Return which of several signatures a function has.

    Args:
        function: Of vLLM.
        known: Names of parameters, in order, in one string each: `self request num_tokens`.

    Raises:
        UnknownVllm: It has none of these.
    """
    found = " ".join(inspect.signature(function).parameters)
    if found not in known:
        raise UnknownVllm(
            f"{function.__qualname__}({found.replace(' ', ', ')}) is not what it should be"
        )
    return found
