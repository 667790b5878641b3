"""The base of every mapping of the configuration, how a broken rule is reported, and words that
other rooms share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Literal, TypeAlias

from pydantic import (
    BaseModel,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
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
    """Return the error for a validator to raise; *text* is the value, unless secret, and the
    rule."""
    return PydanticCustomError(RULE, "{text}", {"text": text})


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


class Section(
    BaseModel,
    frozen=True,
    extra="forbid",
    strict=True,
    hide_input_in_errors=True,
):
    """A mapping in the configuration."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield the rules that values break together though each is valid: their locations in this
        section, and texts as for `broken_rule`."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Section:
        found = [
            InitErrorDetails(type=broken_rule(text), loc=location, input=None)
            for location, text in self.contradictions()
        ]
        if found:
            name = type(self).__name__
            raise ValidationError.from_exception_data(name, found, hide_input=True)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _default_for_empty_section(cls, value: object, info: ValidationInfo) -> object:
        """A section whose lines are all commented out is null in YAML."""
        default = cls.model_fields[info.field_name or ""].default
        is_section = isinstance(default, Section) or is_dataclass(default)
        return default if value is None and is_section else value
