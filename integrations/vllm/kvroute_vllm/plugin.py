"""The function that vLLM calls when it starts, in every one of its processes."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import vllm

from kvroute_vllm.recognition import UnknownVllm, check_version

logger = logging.getLogger("vllm.plugins.kvroute")


def register() -> None:
    """Add to vLLM what is recognised; the rest stays as vLLM has it, and one log line names the
    reason."""
    try:
        release = check_version(vllm.__version__)
    except UnknownVllm as error:
        logger.warning("kvroute: this vLLM stays as it is: %s", error)
        return
    takes_hints = _install("retention", "takes no hints")
    _install("publisher", 'has no publisher "kvroute"', release, takes_hints)


def _install(module: str, loss: str, *arguments: Any) -> bool:
    try:
        # vLLM's own modules may be gone, or lack something: no reason not to start.
        import_module(f"kvroute_vllm.{module}").install(*arguments)
    except (UnknownVllm, ImportError, AttributeError) as error:
        logger.warning("kvroute: this vLLM %s: %s", loss, error)
        return False
    return True
