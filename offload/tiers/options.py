"""A specification's own options, checked against a class that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvevents.layout import GroupKind
from offload.base import OffloadingManager
from offload.errors import CacheConfigError
from offload.reuse_filter import ReuseFilter
from offload.tiers.base import TierHost

Count = Annotated[int, msgspec.Meta(ge=1)]


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that all built-in tiers have; other packages may build on it."""

    blocks_per_offloaded_block: Count = 1
    """For all groups but those of states, whose blocks are not adjacent."""
    min_uses: Count = 1
    """Store only blocks that so many requests used; see `ReuseFilter`."""
    max_tracked: Count = 100_000
    """Blocks whose uses are remembered, with `min_uses` above 1."""

    def sizes(self, host: TierHost) -> tuple[int, ...]:
        """`blocks_per_offloaded_block`, per group."""
        return tuple(
            1 if group.kind is GroupKind.MAMBA else self.blocks_per_offloaded_block
            for group in host.groups
        )

    def needs_events(self, host: TierHost) -> bool:
        """Return whether the manager must report events: for the engine, or for the tier's
        aliases."""
        return host.enable_events or self.blocks_per_offloaded_block > 1

    def filtered(self, manager: OffloadingManager) -> OffloadingManager:
        """The manager, behind a `ReuseFilter` if one was asked for."""
        if self.min_uses == 1:
            return manager
        return ReuseFilter(manager, self.min_uses, self.max_tracked)


Options = TypeVar("Options", bound=msgspec.Struct)


def read_options(kind: type[Options], tier: str, given: Mapping[str, Any]) -> Options:
    """Check configured values against a specification's options.

    Args:
        kind: The options' class; text is converted to the types of its fields.

    Raises:
        CacheConfigError: An option is unknown, missing, or has a value that does not fit.
    """
    fields = {each.name: each for each in msgspec.structs.fields(kind)}
    for name in given:
        if name not in fields:
            close = get_close_matches(name, fields, 1)
            guess = f"did you mean {close[0]}? " if close else ""
            raise CacheConfigError(
                f"{tier} tier: option {name[:40]!r} is unknown; {guess}known: {', '.join(fields)}"
            )
    values = {}
    for name, each in fields.items():
        if name in given:
            values[name] = _converted(given[name], each.type, f"{tier} tier: {name}")
        elif each.required:
            raise CacheConfigError(f"{tier} tier: {name} is missing")
    return kind(**values)


def _converted(value: Any, wanted: Any, place: str) -> Any:
    if wanted is Path and isinstance(value, (str, Path)):
        return Path(value)
    try:
        return msgspec.convert(value, wanted, strict=False)
    except msgspec.ValidationError as error:
        rule = str(error)
        raise CacheConfigError(
            f"{place} {str(value)[:40]!r}: {rule[:1].lower()}{rule[1:]}"
        ) from None
