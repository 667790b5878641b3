"""Defines the base of every mapping of the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ValidationInfo, field_validator, model_validator

from router.config.rules import Location, refusal
from router.policies.types import Weights


class Section(
    BaseModel,
    frozen=True,
    extra="forbid",
    strict=True,
    hide_input_in_errors=True,
):
    """A mapping in the configuration."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield the rules that values break together though each is valid, with their locations in
        this section."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Section:
        found = list(self.contradictions())
        if found:
            raise refusal(type(self).__name__, found)
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _default_for_empty_section(cls, value: object, info: ValidationInfo) -> object:
        """A section whose lines are all commented out is null in YAML."""
        default = cls.model_fields[info.field_name or ""].default
        return default if value is None and isinstance(default, Section | Weights) else value
