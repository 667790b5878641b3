"""Request bodies as a hostile client might write them: the right names, with anything behind
them."""

from __future__ import annotations

from hypothesis import strategies as st

_NAMES = (
    *(
        "messages",
        "prompt",
        "input",
        "token_ids",
        "role",
        "content",
        "type",
        "text",
        "tools",
        "function",
        "arguments",
    ),
    *(
        "name",
        "model",
        "cache_salt",
        "tool_calls",
        "system",
        "output",
        "source",
        "input_schema",
        "n",
        "reasoning",
    ),
    *(
        "thinking",
        "summary",
        "documents",
        "endpoint",
        "truncate_prompt_tokens",
        "max_tokens",
        "chat_template_kwargs",
    ),
)
_VALUES = (
    *(
        "user",
        "system",
        "assistant",
        "tool",
        "developer",
        "tool_result",
        "tool_use",
        "function_call",
        "message",
    ),
    *("function", "text", "image_url", '{"a": "\\ud800"}', '{"a": [1e999]}', "/v1/messages"),
)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)


def _values() -> st.SearchStrategy[object]:
    names, values = st.sampled_from(_NAMES), st.sampled_from(_VALUES)
    return st.recursive(
        _SCALARS | values,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6),
        max_leaves=20,
    )


def _messages() -> st.SearchStrategy[object]:
    """Objects that pass for messages, so that what comes after the first look is reached too."""
    names = st.sampled_from([name for name in _NAMES if name not in ("role", "content")])
    role = st.sampled_from(["user", "assistant", "system", "tool", "developer"])
    content = (
        st.none()
        | st.text(max_size=5)
        | st.lists(st.dictionaries(st.sampled_from(["type", "text"]), st.sampled_from(_VALUES)))
    )
    call = st.fixed_dictionaries(
        {
            "function": st.dictionaries(
                st.sampled_from(["name", "arguments"]), st.sampled_from(_VALUES)
            )
        }
    )
    calls = st.lists(call, max_size=2)
    message = st.fixed_dictionaries(
        {"role": role, "content": content}, optional={"tool_calls": calls, "x": _values()}
    )
    return st.lists(
        message | st.dictionaries(names, _values(), max_size=3) | message | message,
        min_size=1,
        max_size=4,
    )


def bodies() -> st.SearchStrategy[object]:
    """Any JSON, most of it almost right."""
    fields = st.dictionaries(st.sampled_from(_NAMES), _values(), max_size=6)
    chats = st.fixed_dictionaries(
        {"messages": _messages()}, optional={"tools": _values(), "chat_template_kwargs": _values()}
    )
    return _values() | fields | chats | chats
