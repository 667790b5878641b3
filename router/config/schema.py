"""The configuration's models: frozen pydantic models that know their defaults and refuse unknown
keys.

Units are part of the names: `_s` is seconds, `_bytes` bytes, `_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from kvevents.events import STORAGE
from kvevents.listener import LISTENED_TO
from router.config.discovery import DiscoveryConfig
from router.config.document import parse_document, problems_in, read_text
from router.config.models import ModelConfig, VersionedModelConfig
from router.config.replica import ReplicaConfig, ReplicaOptions
from router.config.routing import OverloadConfig, PolicyConfig, PrefillConfig
from router.config.section import Location, Section
from router.config.server import DoorsConfig, ObservabilityConfig, ServerConfig
from router.config.sharing import BoardConfig, StateConfig
from router.config.values import Items
from router.config.watch import ApproximateConfig, EventsConfig, HealthConfig
from router.errors import ConfigError, ConfigProblem
from router.policies.types import Weights

# --- the whole ------------------------------------------------------------------------------------


class RouterConfig(Section, frozen=True):
    """Everything that is configured. Frozen; at run time replicas are added to and removed from the
    registry, not here."""

    server: ServerConfig = ServerConfig()
    models: Items[ModelConfig] = ()
    versioned_models: Items[VersionedModelConfig] = ()
    replicas: Items[ReplicaConfig] = ()
    discovery: DiscoveryConfig = DiscoveryConfig()
    policy: PolicyConfig = PolicyConfig()
    prefill: PrefillConfig = PrefillConfig()
    health: HealthConfig = HealthConfig()
    overload: OverloadConfig = OverloadConfig()
    doors: DoorsConfig = DoorsConfig()
    events: EventsConfig = EventsConfig()
    approximate: ApproximateConfig = ApproximateConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    state: StateConfig = StateConfig()
    board: BoardConfig = BoardConfig()

    @classmethod
    def load(cls, path: str | Path, environ: Mapping[str, str]) -> RouterConfig:
        """Read a file. Relative paths in it start at its own directory.

        Args:
            environ: Where `${NAME}` is looked up, as `os.environ`.
        Raises:
            ConfigError: The file cannot be read, or has problems; the message lists all of them.
        """
        return cls.from_yaml(read_text(Path(path)), environ, Path(path).parent)

    @classmethod
    def from_yaml(
        cls,
        text: str,
        environ: Mapping[str, str],
        base_directory: Path | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> RouterConfig:
        """Read a text.

        Args:
            text: The YAML document; an empty one means the defaults.
            environ: Where `${NAME}` is looked up, as `os.environ`.
            base_directory: Where relative paths start; None leaves them as they are.
            overrides: A document from the command line, checked together with the text: its values
                replace the text's, its lists are added to them.
        Raises:
            ConfigError: With every problem in the text.
        """
        document = parse_document(text)
        data = _overridden({} if document is None else document, overrides)
        context = {"environ": environ, "directory": base_directory}
        try:
            config = cls.model_validate(data, context=context)
        except ValidationError as error:
            raise ConfigError([*problems_in(error, cls), *_across(data, context)]) from None
        problems = list(_across(data, context))
        if problems:
            raise ConfigError(problems)
        return config

    def contradictions(self) -> Iterator[tuple[Location, str]]:
        """Yield the options that name a missing key or priority class."""
        if self.observability.metrics_need_key and not self.server.operator_keys:
            place: Location = ("observability", "metrics_need_key")
            yield place, "true; server.operator_api_key must be set for that"
        if self.state.peers and self.board.secret is None:
            yield (
                ("state", "peers"),
                "there must be a board.secret for that, the same at all of them",
            )
        yield from self._listening()
        yield from self._picking()
        if self.events.curve_keys is None:
            yield from self._keys_without_ours()
        known = self.overload.priorities
        for index, key in enumerate(self.server.client_api_keys):
            if key.priority is not None and key.priority not in known:
                rule = f"{key.priority!r}; expected one of overload.priorities: {', '.join(known)}"
                yield ("server", "client_api_keys", index, "priority"), rule

    @property
    def owns_priority(self) -> bool:
        """Return whether the router decides the order of requests at engines: where it
        distinguishes clients, or orders them itself."""
        overload = self.overload
        ordered = overload.is_queueing or overload.priority_header is not None
        orders_engines = any(each.priority_order is not None for _, each in self._options())
        return ordered or bool(self.server.client_api_keys) or orders_engines

    def _listening(self) -> Iterator[tuple[Location, str]]:
        """Yield sources without a listener to connect to, and with keys that it does not check."""
        ranks = 0 if self.events.listen is None else self.events.listen_ranks
        for place, options in self._options():
            for index, source in enumerate(options.kv_events or ()):
                if source.endpoint != LISTENED_TO:
                    continue
                if not ranks:
                    rule = "listen; there must be events.listen for that"
                    yield (*place, "kv_events", index, "endpoint"), rule
                elif source.dp_rank >= ranks:
                    rule = f"{source.dp_rank}; must be below events.listen_ranks ({ranks})"
                    yield (*place, "kv_events", index, "dp_rank"), rule
                if source.server_key is not None:
                    rule = "who connects to the router shows no key; must be left out"
                    yield (*place, "kv_events", index, "server_key"), rule

    def _picking(self) -> Iterator[tuple[Location, str]]:
        """Yield options of the endpoint picker that come to a wrong address."""
        picker = self.doors.ext_proc
        if picker.rank_ports and picker.fallbacks:
            rule = "true; a rank's port is that of one endpoint: fallbacks must be 0"
            yield ("doors", "ext_proc", "rank_ports"), rule

    def _options(self) -> Iterator[tuple[Location, ReplicaOptions]]:
        """Yield all options of replicas, with their places."""
        for index, replica in enumerate(self.replicas):
            yield ("replicas", index), replica
        for index, dns in enumerate(self.discovery.dns):
            yield ("discovery", "dns", index, "replica"), dns.replica
        for index, pods in enumerate(self.discovery.kubernetes):
            yield ("discovery", "kubernetes", index, "replica"), pods.replica

    def _keys_without_ours(self) -> Iterator[tuple[Location, str]]:
        rule = "there must be events.curve_keys for that"
        if self.events.curve_server_key is not None:
            yield ("events", "curve_server_key"), rule
        for place, options in self._options():
            for index, source in enumerate(options.kv_events or ()):
                if source.server_key is not None:
                    yield (*place, "kv_events", index, "server_key"), rule

    @property
    def weights(self) -> Weights:
        """Return the policy's weights, with a cost for every shared store: one that they do not
        name costs what the slowest tier behind it does."""
        weights = self.policy.weights
        costs = dict(weights.tier_token)
        for store in (store for model in self.models for store in model.stores):
            known = max(map(weights.of_tier, store.tiers or (STORAGE,)))
            costs.setdefault(store.name.upper(), known)
        return replace(weights, tier_token=costs)

    def to_public_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data, with every secret masked."""
        return self.model_dump(mode="json")


def _overridden(data: object, overrides: Mapping[str, Any]) -> object:
    """Return a document with *overrides*; what is of another type is left to be refused."""
    if not isinstance(data, dict):
        return data
    merged = dict(data)
    for key, value in overrides.items():
        before = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = _overridden({} if before is None else before, value)
        elif isinstance(value, list) and before is not None:
            merged[key] = [*before, *value] if isinstance(before, list) else before
        else:
            merged[key] = value
    return merged


# --- contradictions between sections --------------------------------------------------------------

SectionT = TypeVar("SectionT", bound=Section)


def _across(data: object, context: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Yield problems between sections, among those that are valid by themselves: a typo in one
    replica does not hide that two others share an id."""
    models = list(_valid(ModelConfig, data, "models", context))
    replicas = list(_valid(ReplicaConfig, data, "replicas", context))
    versioned = list(_valid(VersionedModelConfig, data, "versioned_models", context))
    names = [
        (f"{path}.{place}", name) for path, model in models for place, name in _name_places(model)
    ]
    yield from _repeated([*names, *((f"{path}.name", each.name) for path, each in versioned)])
    yield from _nested(versioned)
    yield from _repeated([(f"{path}.id", replica.replica_id) for path, replica in replicas])
    yield from _repeated([(f"{path}.url", str(replica.origin)) for path, replica in replicas])
    known = {name for _, model in models for name in model.names}
    for path, replica in replicas if known else []:
        yield from _unknown_models(path, replica, known)


def _valid(
    kind: type[SectionT], data: object, key: str, context: dict[str, Any]
) -> Iterator[tuple[str, SectionT]]:
    """Yield the sections of the list *key* that can be read, each with its path."""
    items = data.get(key) if isinstance(data, dict) else None
    for index, item in enumerate(items if isinstance(items, list) else ()):
        with suppress(ValidationError):
            yield f"{key}[{index}]", kind.model_validate(item, context=context)


def _nested(versioned: Sequence[tuple[str, VersionedModelConfig]]) -> Iterator[ConfigProblem]:
    names = {each.name for _, each in versioned}
    for path, each in versioned:
        for index, version in enumerate(each.versions):
            if version.model in names:
                rule = "must be a model that replicas serve, not another versioned name"
                place = f"{path}.versions[{index}].model"
                yield ConfigProblem(place, f"{version.model!r}; {rule}")


def _unknown_models(
    path: str, replica: ReplicaConfig, known: Collection[str]
) -> Iterator[ConfigProblem]:
    for index, name in enumerate(replica.models or ()):
        if name not in known:
            rule = f"expected one of the configured models: {', '.join(sorted(known))}"
            yield ConfigProblem(f"{path}.models[{index}]", f"{name!r}; {rule}")


def _name_places(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield "name", model.name
    for index, alias in enumerate(model.aliases):
        yield f"aliases[{index}]", alias
    for index, adapter in enumerate(model.lora_adapters):
        yield f"lora_adapters[{index}]", adapter


def _repeated(values: Sequence[tuple[str, str]]) -> Iterator[ConfigProblem]:
    first: dict[str, str] = {}
    for place, value in values:
        if value in first:
            yield ConfigProblem(place, f"{value!r}; {first[value]} has it already")
        first.setdefault(value, place)
