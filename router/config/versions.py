"""Names that stand for several versions of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from router.config.rules import Location, repeated
from router.config.section import Section
from router.config.values import PLAIN, HeaderName, Items, Name


class VersionConfig(Section, frozen=True):
    """One of the versions."""

    model: Name
    """A model, alias or adapter that replicas serve."""
    weight: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False), PLAIN] = 1.0
    """Change it when versions should get different shares of the requests; with `0` a version gets
    only those that choose it."""
    label: Annotated[str, Field(min_length=1, max_length=256), PLAIN] | None = None
    """The value of the header that chooses it; null: the model's name.

    Change it when clients choose it by another word than the model's name."""

    @property
    def chosen_by(self) -> str:
        """The header's value."""
        return self.label or self.model


class VersionedModelConfig(Section, frozen=True):
    """A name that clients use, and the models that it stands for."""

    name: Name
    """The model name in requests. No model, alias or adapter may have it."""
    header: HeaderName = "x-model-version"
    """With this header a client chooses a version, by its label.

    Change it when clients choose by another one; its value is a version's `label`, and any other
    value is no choice."""
    versions: Annotated[Items[VersionConfig], Field(min_length=1, max_length=64)]
    """The models that it stands for."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Versions with one label, and weights that are all zero."""
        yield from repeated("versions", [each.model for each in self.versions], "model")
        yield from repeated("versions", [each.chosen_by for each in self.versions], "label")
        if not any(version.weight for version in self.versions):
            yield ("versions",), "all weights are 0; at least one must be above"
