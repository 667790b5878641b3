"""The models the router knows: each with its index, its tokenisation and all of its names."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from router.config.models import TOKENIZER_AT_REPLICA, ModelConfig
from router.errors import ConfigError, ConfigProblem, UnknownModel
from router.fleet.replica import Replica
from router.index.base import SourceId, SourceStatistics
from router.index.index import PrefixIndex
from router.prompt.errors import ModelFilesError
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import read_model_files
from router.prompt.processes import LargeWork
from router.prompt.remote import RemoteTokenizer
from router.prompt.tokenization import Tokenization
from router.routing.model import Model
from router.routing.versions import Versions

logger = logging.getLogger(__name__)

FetchForModel: TypeAlias = Callable[[Sequence[str], str, bytes], Awaitable[tuple[int, bytes]]]
"""`(names, path, body) -> (status, body)`: asks some replica that serves the model by one of its
names."""

MAX_NAMES = 16_384
"""Bound on names of models and adapters: a replica must not make the router grow without end."""


class _NameTarget(NamedTuple):
    """The base model behind a name, and the adapter if it is one."""

    base: str
    adapter: str | None = None


class ModelSet:
    """Models by name. Configured ones stay; others are added when a replica reports them, and
    forgotten when no replica serves them any more."""

    def __init__(
        self,
        configured: Iterable[ModelConfig],
        fetch: FetchForModel,
        new_index: Callable[[], PrefixIndex] = PrefixIndex,
        large_work: LargeWork | None = None,
        versions: Versions | None = None,
    ) -> None:
        """Load the tokenizers of all configured models.

        Args:
            configured: `models` of the configuration.
            fetch: Asks replicas for token ids, where the router has no tokenizer.
            new_index: Makes the index of a model.
            versions: The names that stand for several models.
        Raises:
            ConfigError: Tokenizers or chat templates cannot be used; all of them are named.
        """
        self._fetch = fetch
        self._new_index = new_index
        self._large_work = large_work
        self.versions = versions or Versions()
        self._models: dict[str, Model] = {}
        self._tokenizations: dict[str, Tokenization] = {}
        self._names: dict[str, _NameTarget] = {}
        problems = [
            problem
            for index, config in enumerate(configured)
            if (problem := self._add_configured(index, config))
        ]
        if problems:
            raise ConfigError(problems)
        self._configured = frozenset(self._names)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    def get(self, name: str) -> Model | None:
        """The base model of exactly this name, not an alias or an adapter."""
        return self._models.get(name)

    def index_of(self, name: str) -> PrefixIndex:
        """The index of the base model of exactly this name, which must be known."""
        return self._models[name].index

    def tokenization_of(self, model: Model) -> Tokenization:
        """Return the tokenisation of a model's prompts. One that was forgotten meanwhile was not
        configured: its replicas tokenise."""
        found = self._tokenizations.get(model.name)
        return self._at_replica(model) if found is None else found

    def resolve(self, name: str | None) -> tuple[Model, str | None]:
        """Return the base model that a request's `model` stands for, and the adapter if it is one.

        None, or an empty name, stands for the only model there is, as in the engines.

        Raises:
            UnknownModel: No replica serves it, or there are several and the request names none.
        """
        if not name and len(self._models) == 1:
            return next(iter(self._models.values())), None
        found = self._names.get(name or "") or self._adapter_of(name or "")
        if found is None:
            raise UnknownModel(name or "(none named)")
        return self._models[found.base], found.adapter

    def _adapter_of(self, name: str) -> _NameTarget | None:
        """Return the adapter that is named together with its model, as SGLang has it:
        `MODEL:ADAPTER`. Either may have colons of its own."""
        for model in self._models.values():
            for base in model.names:
                found = self._names.get(name.removeprefix(f"{base}:"))
                if found and found.adapter and found.base == model.name:
                    return found
        return None

    def discover(self, name: str, parent: str | None = None) -> Model | None:
        """Make a name known that a replica serves; return its base model.

        Args:
            parent: The model it adapts; None for a model.
        Returns:
            None where `MAX_NAMES` are known already.
        """
        if name in self._names:
            return self._models[self._names[name].base]
        if len(self._names) >= MAX_NAMES:
            return None
        base = self._names[parent].base if parent in self._names else parent or name
        if base not in self._models:
            self._models[base] = Model(base, index=self._new_index())
            self._tokenizations[base] = self._at_replica(self._models[base])
            self._names[base] = _NameTarget(base)
        self._names[name] = _NameTarget(base, name if parent else None)
        return self._models[base]

    def forget_all_but(self, served: Container[str]) -> list[str]:
        """Forget the names that are neither configured nor among *served*.

        Returns:
            The base models that were forgotten, and their indexes with them.
        """
        unserved = [
            name for name in self._names if name not in self._configured and name not in served
        ]
        for name in unserved:
            if self._names[name].adapter is not None:
                del self._names[name]
        needed = {found.base for name, found in self._names.items() if name != found.base}
        gone = [name for name in unserved if name in self._models and name not in needed]
        for name in gone:
            del self._names[name]
            del self._models[name]
            self._tokenizations.pop(name).close()
        return gone

    def names(self) -> dict[str, str | None]:
        """Every name a request may use, with the base model of those that are adapters."""
        names = {name: found.base if found.adapter else None for name, found in self._names.items()}
        return {**names, **dict.fromkeys(self.versions.names())}

    def serving(self, name: str, replicas: Iterable[Replica]) -> list[Replica]:
        """Return those of *replicas* that can take requests for a name, under any of its spellings.

        Args:
            name: A model's, an adapter's, or one that stands for several.
        """
        theirs = {
            each
            for model in self.versions.models_of(name) or (name,)
            for each in self._spellings(model)
        }
        return [replica for replica in replicas if any(replica.serves(each) for each in theirs)]

    def _spellings(self, name: str) -> tuple[str, ...]:
        """Return the names that replicas may have for a model or an adapter."""
        found = self._names.get(name)
        if found is None or found.adapter is not None:
            return (name,)
        return self._models[found.base].names

    def tokenizers(self) -> dict[str, str]:
        tokenizers = {
            name: tokenization.local
            for name, tokenization in self._tokenizations.items()
            if name in self._configured
        }
        return {
            name: str(local.backend) if local else TOKENIZER_AT_REPLICA
            for name, local in tokenizers.items()
        }

    def index_statistics(self) -> dict[SourceId, SourceStatistics]:
        """The blocks of every source, over all models."""
        return {
            source: found
            for model in self._models.values()
            for source, found in model.index.statistics().items()
        }

    def close(self) -> None:
        for tokenization in self._tokenizations.values():
            tokenization.close()

    def _add_configured(self, index: int, config: ModelConfig) -> ConfigProblem | None:
        try:
            tokenization = Tokenization(
                local=_local_tokenizer(config),
                remote=self._remote((config.name, *config.aliases)),
            )
        except ModelFilesError as error:
            return ConfigProblem(f"models[{index}]", str(error))
        if tokenization.local is not None:
            logger.info("model %s: tokenised by %s", config.name, tokenization.local.backend)
        self._tokenizations[config.name] = tokenization
        self._models[config.name] = Model(
            config.name,
            config.aliases,
            config.layout.to_hints(),
            self._new_index(),
            config.stores,
            config.retention_hints,
        )
        for name in (config.name, *config.aliases):
            self._names[name] = _NameTarget(config.name)
        for adapter in config.lora_adapters:
            self._names[adapter] = _NameTarget(config.name, adapter)
        return None

    def _at_replica(self, model: Model) -> Tokenization:
        return Tokenization(remote=self._remote(model.names))

    def _remote(self, names: Sequence[str]) -> RemoteTokenizer:
        async def fetch(path: str, body: bytes) -> tuple[int, bytes]:
            return await self._fetch(names, path, body)

        return RemoteTokenizer(fetch, large_work=self._large_work)


def _local_tokenizer(config: ModelConfig) -> LocalTokenizer | None:
    if config.tokenized_at_replica:
        return None
    return LocalTokenizer(
        read_model_files(Path(config.tokenizer)),
        chat_template=_read_template(config.chat_template),
        template_arguments=config.chat_template_kwargs,
        use_native=config.tokenizer_library == "auto",
    )


def _read_template(template: str | None) -> str | None:
    if template is None:
        return None
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or "not UTF-8"
        raise ModelFilesError(template, found, "must be a readable text file") from error
