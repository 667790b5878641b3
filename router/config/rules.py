"""How a broken rule of the configuration is reported, and words that other rooms share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Literal, TypeAlias

from pydantic import SecretStr, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

PriorityOrder: TypeAlias = Literal["lower_first", "higher_first"]
"""The order in which an engine serves priority numbers."""
Role: TypeAlias = Literal["both", "prefill", "decode"]
"""A replica's part, where prompts and responses may be computed apart."""

Location: TypeAlias = tuple[int | str, ...]
"""A path as pydantic writes it: `("replicas", 1, "url")`."""
RULE = "rule"
"""The type of the errors that rules of our own raise."""


def broken_rule(text: str) -> PydanticCustomError:
    """The error for a validator to raise; *text* is the value, unless secret, and the rule."""
    return PydanticCustomError(RULE, "{text}", {"text": text})


def refusal(title: str, found: Iterable[tuple[Location, str]]) -> ValidationError:
    """Several broken rules as one error, for a validator of a whole model to raise.

    Args:
        found: Each broken rule's location in the model, and its text as for `broken_rule`.
    """
    return ValidationError.from_exception_data(
        title,
        [InitErrorDetails(type=broken_rule(text), loc=loc, input=None) for loc, text in found],
        hide_input=True,
    )


def repeated(
    name: str, values: Iterable[Hashable], field: str | None = None
) -> Iterator[tuple[Location, str]]:
    """Yield the entries of a list that have what an earlier one has, for `Section.contradictions`.

    Args:
        name: The list's.
        values: What each entry has, in *field*; None: the entries themselves.
    """
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        holder = first.setdefault(value, index)
        if holder != index:
            shown = "not shown" if isinstance(value, SecretStr) else repr(value)
            place = (name, index) if field is None else (name, index, field)
            yield place, f"{shown}; {name}[{holder}] has it already"
