"""Models: their names, tokenizers and templates, and the facts about their caches that events leave
out."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from kvevents.errors import LayoutError
from kvevents.events import GPU, GroupSpec
from kvevents.layout import KVCacheGroup, KVCacheLayout, group_from_spec
from router.config.section import Location, Section, repeated
from router.config.values import (
    PLAIN,
    DrafterGroups,
    FilePath,
    HeaderName,
    Items,
    Name,
    PlacedPath,
    Tokens,
    Window,
    placed,
)
from router.index.layout_learner import LayoutHints, StoreHint, TierHint

TOKENIZER_AT_REPLICA = "replica"


def _placed_tokenizer(path: str, info: ValidationInfo) -> str:
    return path if path == TOKENIZER_AT_REPLICA else placed(path, info)


TokenizerPath = Annotated[FilePath, AfterValidator(_placed_tokenizer)]


class GroupConfig(Section, frozen=True):
    """One KV cache group of a model."""

    kind: Name
    """Its name in events: `full_attention`, `sliding_window`, `mamba` and the others that vLLM
    names."""
    block_size: Tokens
    """Tokens in a block of this group, as in its events."""
    sliding_window: Window | None = None
    """Change it when the kind is a sliding window: then it is required."""
    attention_chunk_size: Window | None = None
    """Change it when the kind is chunked local attention: then it is required."""

    def to_group(self, index: int) -> KVCacheGroup:
        """Return the group as the hit rule knows it; raises `LayoutError`."""
        return group_from_spec(
            index,
            GroupSpec(self.kind, self.block_size, self.sliding_window, self.attention_chunk_size),
        )


class LowerTierConfig(Section, frozen=True):
    """Tells how much one lower tier keeps together, where its events show it too late."""

    medium: Annotated[str, Field(min_length=1, max_length=64), PLAIN]
    """The tier's name in events, in any case."""
    blocks_per_chunk: Annotated[int, Field(ge=1, le=4096), PLAIN] | None = None
    """Blocks of each group, as in vLLM's option of this name.

    Change it when vLLM's option of this name is set, or its `block_size`."""
    block_size: Tokens | None = None
    """Tokens, as in vLLM's option of this name, or LMCache's `chunk_size`.

    Change it when chunks have one size for all groups: LMCache's `chunk_size`. Exactly one of the
    two is required."""

    def to_hint(self) -> tuple[str, TierHint]:
        """Return the same for the index."""
        return self.medium.upper(), TierHint(self.blocks_per_chunk, self.block_size)

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield that both sizes are given, or neither."""
        if (self.blocks_per_chunk is None) == (self.block_size is None):
            yield (), "must have either blocks_per_chunk or block_size"


class LayoutConfig(Section, frozen=True):
    """Holds facts about a model's cache that events leave out. Everything is optional."""

    groups: Items[GroupConfig] = ()
    """The groups, by index.

    Change it when a group's kind, window or chunk is missing from the events:
    `attention_chunk_size` of Llama 4, kinds before vLLM 0.22."""
    hash_block_size: Tokens | None = None
    """Change it when hashes are farther apart than the greatest common divisor of the block sizes
    seen."""
    scheduler_block_size: Tokens | None = None
    """Change it when hits are multiples of something other than the least common multiple of the
    block sizes seen."""
    eagle: DrafterGroups = False
    """Change it when the engines draft with EAGLE or MTP: each hit is a block shorter, and no event
    shows it. `true` for all groups; a list, as `[0]`, of those that hold the drafter's layers"""
    eagle_sees_last_token: bool = True
    """Change it when `eagle` is set and the engines are vLLM before 0.32."""
    prefix_replay_tokens: Annotated[int, Field(ge=0, le=2**20), PLAIN] = 0
    """Tokens of a hit's end that the engine computes again.

    Change it when the engines rebuild a sliding window after a hit instead of caching it, as vLLM
    does for DeepSeek V4.1: the window's tokens. A hit that is no longer is worth nothing"""
    authoritative: bool = False
    """The groups override what events report.

    Change it when events carry wrong kinds or windows; `groups` must then be complete."""
    assume_unseen: bool = LayoutHints().assume_unseen
    """Groups that no event has named yet exist all the same.

    Change it when `groups` lists groups that these engines do not have."""
    hash_seeds: Items[Annotated[str, PLAIN]] = LayoutHints().hash_seeds
    """Change it when the engines run with a different `PYTHONHASHSEED`; put it first."""
    tiers: Items[LowerTierConfig] = ()
    """Lower tiers.

    Change it when predictions from a lower tier are wrong until its events have shown how much it
    keeps together."""

    def to_hints(self) -> LayoutHints:
        """Return the same for the index."""
        groups = tuple(group.to_group(index) for index, group in enumerate(self.groups))
        tiers = tuple(tier.to_hint() for tier in self.tiers)
        return LayoutHints(**{**dict(self), "groups": groups, "tiers": tiers})

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield invalid groups and inconsistent sizes."""
        groups = []
        for index, group in enumerate(self.groups):
            made = _made(group, index)
            if isinstance(made, str):
                yield ("groups", index), made
            else:
                groups.append(made)
        if self.authoritative and not self.groups:
            yield ("authoritative",), "true; there must be groups for that"
        if not groups or len(groups) < len(self.groups):
            return
        try:
            KVCacheLayout.build(groups, self.hash_block_size, self.scheduler_block_size, self.eagle)
        except LayoutError as error:
            yield (), str(error)


def _made(group: GroupConfig, index: int) -> KVCacheGroup | str:
    """Return a group as the hit rule knows it, or why there can be none."""
    try:
        return group.to_group(index)
    except LayoutError as error:
        return str(error)


class StoreConfig(Section, frozen=True):
    """A store that several replicas of a model read and write: one file system, one bucket."""

    name: Name
    """The name of the store; in `/route`, in metrics, and in `policy.weights.tier_token`."""
    tiers: Items[Annotated[str, Field(min_length=1, max_length=256), PLAIN]] = ()
    """Change it when engines do not announce what is `REMOTE`: blocks in these tiers are in the
    store, unless announced as `LOCAL`. Empty: whatever is announced as `REMOTE`."""
    ownership: Annotated[str, Field(min_length=1, max_length=256), PLAIN] | None = None
    """Only blocks announced with this `ownership`, where an engine has several such tiers.

    Change it when an engine has several such tiers; vLLM's events name one in `ownership`."""
    replicas: Items[Annotated[str, Field(min_length=1, max_length=128), PLAIN]] | None = None
    """Ids of the replicas that share it; null: all.

    Change it when not all replicas share it; `*` stands for any characters."""

    def is_shared_by(self, replica_id: str) -> bool:
        """Return whether a replica reads and writes it."""
        if self.replicas is None:
            return True
        return any(fnmatchcase(replica_id, pattern) for pattern in self.replicas)

    def to_hint(self) -> StoreHint:
        """Return the same for the index."""
        return StoreHint(self.name, tuple(tier.upper() for tier in self.tiers), self.ownership)

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield a tier that cannot be shared."""
        for index, tier in enumerate(self.tiers):
            if tier.upper() == GPU:
                yield ("tiers", index), f"{tier!r}; a GPU's blocks are its replica's own"


class ModelConfig(Section, frozen=True):
    """One model, as replicas serve it."""

    name: Name
    """The name under which replicas serve it."""
    aliases: Items[Name] = ()
    """Change it when replicas serve the same model under other names. A request may use any of
    them; its `model` is rewritten where the replica has another name for it, and all else stays
    byte for byte."""
    tokenizer: TokenizerPath = TOKENIZER_AT_REPLICA
    """A directory with the model's tokenizer files, or `replica`: ask a replica's /tokenize.

    Change it when you have the model's files (`tokenizer.json`, `tokenizer_config.json`, chat
    template): this saves a round trip per prompt; by which library, see
    [operations.md](operations.md#tokenizers)."""
    tokenizer_library: Literal["auto", "tokenizers"] = "auto"
    """Change it when a vocabulary should not be trusted to `fastokens`, though it passed all
    checks; `auto` takes it where it gives the same ids."""
    chat_template: PlacedPath | None = None
    """A file that replaces the model's own template.

    Change it when the engines run with a `--chat-template` of their own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the template that requests may override.

    Change it when the engines run with `--default-chat-template-kwargs`: to the same."""
    lora_adapters: Items[Name] = ()
    """Adapters that requests may name in place of this model; more are discovered where replicas
    list them.

    Change it when replicas do not list their adapters in `GET /v1/models`."""
    layout: LayoutConfig = LayoutConfig()
    retention_hints: Literal["auto", "always", "never"] = "auto"
    """Selects the replicas that get hints on which windows and states to keep
    ([steering](steering.md)).

    Change it to `always` for vLLM with the plug-in but with its own publisher of events, which
    cannot announce that it takes hints; to `never` where engines should keep what they keep by
    themselves."""
    stores: Items[StoreConfig] = ()
    """Stores that replicas share; an event belongs to the first that it fits.

    Change it when several replicas share a file system or a bucket."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield stores of one name."""
        yield from repeated("stores", [store.name for store in self.stores], "name")

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that a request may call it by, adapters included."""
        return (self.name, *self.aliases, *self.lora_adapters)

    @property
    def tokenized_at_replica(self) -> bool:
        """Return whether a replica is asked for token ids."""
        return self.tokenizer == TOKENIZER_AT_REPLICA


# --- names that stand for several versions of a model ---------------------------------------------


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
        """Return the header's value."""
        return self.label or self.model


class VersionedModelConfig(Section, frozen=True):
    """A name that clients use, and the models that it stands for."""

    name: Name
    """The model name in requests. No model, alias or adapter may have it."""
    header: HeaderName = "x-model-version"
    """Change it when clients choose by another one; its value is a version's `label`, and any other
    value is no choice."""
    versions: Annotated[Items[VersionConfig], Field(min_length=1, max_length=64)]
    """The models that it stands for."""

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield versions with one label, and weights that are all zero."""
        yield from repeated("versions", [each.model for each in self.versions], "model")
        yield from repeated("versions", [each.chosen_by for each in self.versions], "label")
        if not any(version.weight for version in self.versions):
            yield ("versions",), "all weights are 0; at least one must be above"
