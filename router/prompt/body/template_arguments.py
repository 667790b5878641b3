"""The variables that a request adds to its chat template, the same in every API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.prompt.body.json_fields import check_shape, optional_object

# vLLM takes these values in template arguments as "not given".
_UNSET = (None, "auto")


def template_arguments(fields: Mapping[str, Any], reasoning_effort: object) -> dict[str, Any]:
    """Return the variables that a request adds to its chat template.

    Args:
        fields: The decoded body; its `chat_template_kwargs` come first.
        reasoning_effort: The request's, from which the engine derives `enable_thinking`.
    Raises:
        BadRequest: `chat_template_kwargs` is not an object, or is too large.
    """
    given = optional_object(fields, "chat_template_kwargs", "$") or {}
    check_shape(given, "$.chat_template_kwargs")
    arguments = dict(given)
    if isinstance(reasoning_effort, str) and reasoning_effort != "auto":
        arguments["reasoning_effort"] = reasoning_effort
        arguments.setdefault("enable_thinking", reasoning_effort != "none")
    return {name: value for name, value in arguments.items() if value not in _UNSET}
