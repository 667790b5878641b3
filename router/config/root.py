"""The whole configuration, from one YAML file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from router.config.document import MAX_BYTES, parse_document
from router.config.reader import Reader, Section
from router.config.secret import Secret
from router.config.sections import (
    EventsConfig,
    HealthConfig,
    ModelConfig,
    ObservabilityConfig,
    PolicyConfig,
    ReplicaConfig,
    ServerConfig,
)
from router.errors import BadRequest, ConfigError, Problem

MASK = "***"


class RouterConfig(Section, frozen=True, kw_only=True):
    """Everything that is configured. Frozen; replicas come and go at run time in the registry, not
    here."""

    server: ServerConfig = ServerConfig()
    models: tuple[ModelConfig, ...] = ()
    replicas: tuple[ReplicaConfig, ...] = ()
    policy: PolicyConfig = PolicyConfig()
    health: HealthConfig = HealthConfig()
    events: EventsConfig = EventsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @classmethod
    def load(cls, path: str | Path, environ: Mapping[str, str]) -> RouterConfig:
        """Read a file. Relative paths in it start at its own directory.

        Args:
            path: The YAML file.
            environ: Where `${NAME}` is looked up, as `os.environ`.
        Raises:
            ConfigError: The file cannot be read, or has problems; all of them are in the message.
        """
        try:
            with Path(path).open("rb") as file:
                text = file.read(MAX_BYTES + 1).decode()
        except OSError as error:
            raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
        except UnicodeDecodeError as error:
            raise ConfigError([Problem(str(path), f"byte {error.start} is no UTF-8")]) from None
        return cls.from_yaml(text, environ, Path(path).parent)

    @classmethod
    def from_yaml(
        cls, text: str, environ: Mapping[str, str], base_directory: Path | None = None
    ) -> RouterConfig:
        """Read a text; see `load`."""
        data = parse_document(text)
        reader = Reader(environ)
        config = reader.read(cls, {} if data is None else data)
        problems = [*reader.problems, *_across(reader.found)]
        if problems or config is None:
            raise ConfigError(problems)
        return config if base_directory is None else config._relative_to(base_directory)

    def to_public_dict(self) -> dict[str, Any]:
        """The configuration as plain data, with every secret masked."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_mask)
        return plain

    def _relative_to(self, directory: Path) -> RouterConfig:
        return msgspec.structs.replace(
            self, models=tuple(_model_relative_to(model, directory) for model in self.models)
        )


def read_replica(data: object) -> ReplicaConfig:
    """A replica from the body of a request. It may hold an API key, but not name an environment
    variable.

    Raises:
        BadRequest: With all problems.
    """
    reader = Reader(environ=None)
    replica = reader.read(ReplicaConfig, data, "$")
    if replica is None:
        first, *others = reader.problems
        raise BadRequest(
            first.place, first.text, "; ".join(map(str, others)) or "see the schema in /docs"
        )
    return replica


def _model_relative_to(model: ModelConfig, directory: Path) -> ModelConfig:
    tokenizer = model.tokenizer if model.tokenized_at_replica else str(directory / model.tokenizer)
    template = None if model.chat_template is None else str(directory / model.chat_template)
    return msgspec.structs.replace(model, tokenizer=tokenizer, chat_template=template)


def _mask(value: object) -> str:
    if isinstance(value, Secret):
        return MASK
    raise NotImplementedError(f"{type(value).__name__} has no public form")


# --- what sections must not do to each other ------------------------------------------------------


def _across(found: Sequence[tuple[str, msgspec.Struct]]) -> Iterator[Problem]:
    """Problems between sections, looked for among those that are right in themselves."""
    models = [(path, section) for path, section in found if isinstance(section, ModelConfig)]
    replicas = [(path, section) for path, section in found if isinstance(section, ReplicaConfig)]
    yield from _repeated(
        [(f"{path}.{place}", name) for path, model in models for place, name in _name_places(model)]
    )
    yield from _repeated([(f"{path}.id", replica.replica_id) for path, replica in replicas])
    yield from _repeated([(f"{path}.url", str(replica.origin)) for path, replica in replicas])
    known = {name for _, model in models for name in model.names}
    for path, replica in replicas if known else []:
        yield from _unknown_models(path, replica, known)


def _unknown_models(path: str, replica: ReplicaConfig, known: Collection[str]) -> Iterator[Problem]:
    for index, name in enumerate(replica.models or ()):
        if name not in known:
            rule = f"expected one of the configured models: {', '.join(sorted(known))}"
            yield Problem(f"{path}.models[{index}]", f"{name!r}; {rule}")


def _name_places(model: ModelConfig) -> Iterator[tuple[str, str]]:
    yield "name", model.name
    for index, alias in enumerate(model.aliases):
        yield f"aliases[{index}]", alias
    for index, adapter in enumerate(model.lora_adapters):
        yield f"lora_adapters[{index}]", adapter


def _repeated(values: Sequence[tuple[str, str]]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for place, value in values:
        if value in first:
            yield Problem(place, f"{value!r}; {first[value]} has it already")
        first.setdefault(value, place)
