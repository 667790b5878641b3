"""Tool definitions -> the form in which chat templates get them.

vLLM parses tools into models of its own and hands templates a dump of those: the order of the keys
is the models', `description` and `parameters` are there even where they are null, `strict`
and `defer_loading` only where they are set, and fields it does not know are gone. Templates write
tools as JSON at the very start of a prompt, so a different key order would be a different prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from router.errors import BadRequest
from router.prompt.body.json_fields import object_list, optional_object, optional_text
from router.prompt.errors import describe

_Tool = TypeVar("_Tool", bound="dict[str, Any] | None")


def chat_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read `tools` of a chat completion; None without the field.

    Raises:
        BadRequest: The list or an entry breaks a rule; likewise of the others.
    """
    return _converted(fields, _chat_tool)


def responses_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read `tools` of the responses API, where a function's fields lie beside its type.

    Other kinds of tools (web search, MCP) stay at the server and reach no template.
    """
    tools = _converted(fields, _responses_tool)
    return None if not tools else [tool for tool in tools if tool is not None]


def anthropic_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read `tools` of the messages API: `input_schema` becomes `parameters` and gets a type."""
    return _converted(fields, _anthropic_tool)


def _converted(
    fields: Mapping[str, Any],
    convert: Callable[[dict[str, Any], str], _Tool],
) -> list[_Tool] | None:
    given = fields.get("tools")
    if given is None:
        return None
    tools = object_list(given, "$.tools")
    return [convert(tool, f"$.tools[{index}]") for index, tool in enumerate(tools)]


def _responses_tool(tool: dict[str, Any], place: str) -> dict[str, Any] | None:
    return _tool(_function(tool, place), None) if tool.get("type") == "function" else None


def _chat_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    function = optional_object(tool, "function", place)
    if function is None:
        raise BadRequest(f"{place}.function", "missing", "must be an object with a name")
    defer_loading = tool.get("defer_loading")
    if defer_loading is not None and function.get("defer_loading") is None:
        function = {**function, "defer_loading": defer_loading}
    return _tool(_function(function, f"{place}.function"), defer_loading)


def _anthropic_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    schema = optional_object(tool, "input_schema", place)
    if schema is not None and "type" not in schema:
        schema = {**schema, "type": "object"}
    return _tool(_function({**tool, "parameters": schema}, place), None)


def _tool(function: dict[str, Any], defer_loading: object) -> dict[str, Any]:
    tool: dict[str, Any] = {"type": "function", "function": function}
    if defer_loading is not None:
        tool["defer_loading"] = defer_loading
    return tool


def _function(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str):
        raise BadRequest(f"{place}.name", describe(name), "must be a string")
    known: dict[str, Any] = {
        "name": name,
        "description": optional_text(function, "description", place),
        "parameters": optional_object(function, "parameters", place),
    }
    for option in ("strict", "defer_loading"):
        if function.get(option) is not None:
            known[option] = function[option]
    return known
