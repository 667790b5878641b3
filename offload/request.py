"""One request as the cache sees it: its tokens, the hashes of its blocks, its progress."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any

from typing_extensions import Self

from kvevents.hashing import ExtraKeys, HashChain
from offload.errors import EngineRequestError

MAX_BOUNDARIES = 8
"""The most boundaries that one request can name."""

RETENTION_HINTS = 1
"""Version of the hints that requests carry, as `CacheLayout.retention_hints` announces it."""


@dataclass(frozen=True, slots=True)
class RetentionHints:
    """The blocks of a request that later requests will ask for, by the router's hints.

    They matter to groups that keep sparsely (`CacheConfig.retention_interval`): windows and states.
    Each named boundary costs a window's blocks, or a state.
    """

    boundaries: tuple[int, ...] = ()
    """Lengths of prefixes in tokens, each in the prompt; rounded down to where hits can end."""
    keep_end: bool = False
    """True if the session goes on: then the response stays findable as well, and blocks that the
    request moves past are evicted first where it names no boundary behind them."""

    @classmethod
    def of(cls, kv_transfer_params: Mapping[str, Any] | None, num_prompt_tokens: int) -> Self:
        """Read `kvroute.keep` and `kvroute.keep_end`.

        Args:
            num_prompt_tokens: No boundary lies behind them; those that do are left out.

        Raises:
            EngineRequestError: A field is of another form; the message names place, value and rule.
        """
        hints = (kv_transfer_params or {}).get("kvroute")
        if hints is None:
            return cls()
        place = "kv_transfer_params.kvroute"
        if not isinstance(hints, Mapping):
            raise EngineRequestError(f"{place}: {type(hints).__name__} must be an object")
        keep, keep_end = hints.get("keep", ()), hints.get("keep_end", False)
        if not isinstance(keep, Sequence) or isinstance(keep, str) or len(keep) > MAX_BOUNDARIES:
            raise EngineRequestError(f"{place}.keep must be at most {MAX_BOUNDARIES} lengths")
        for index, length in enumerate(keep):
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise EngineRequestError(
                    f"{place}.keep[{index}]: {length!r:.40} must be a whole number of at least 1"
                )
        if not isinstance(keep_end, bool):
            raise EngineRequestError(f"{place}.keep_end: {keep_end!r:.40} must be true or false")
        return cls(tuple(sorted({n for n in keep if n < num_prompt_tokens})), keep_end)


NO_HINTS = RetentionHints()


@dataclass(frozen=True, slots=True)
class PeerSource:
    """Another engine from whose tier in memory a request's blocks may be pulled."""

    host: str
    """An IPv6 address has brackets."""
    port: int

    @classmethod
    def of(cls, kv_transfer_params: Mapping[str, Any] | None) -> Self | None:
        """Read `remote_kv_source`; None where the field is missing.

        Raises:
            EngineRequestError: A field is of another form; the message names place, value and rule.
        """
        source = (kv_transfer_params or {}).get("remote_kv_source")
        if source is None:
            return None
        place = "kv_transfer_params.remote_kv_source"
        if not isinstance(source, Mapping):
            raise EngineRequestError(f"{place}: {type(source).__name__} must be an object")
        host, port = source.get("remote_host"), source.get("remote_port")
        in_url = _in_url(host) if isinstance(host, str) else ""
        if not _HOST.fullmatch(in_url):
            raise EngineRequestError(f"{place}.remote_host: {host!r:.40} must be a name or address")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65_536:
            raise EngineRequestError(f"{place}.remote_port: {port!r:.40} must be 1 to 65535")
        return cls(in_url, port)


def _in_url(host: str) -> str:
    """Return a name or address as it stands in a URL: an IPv6 address in brackets."""
    try:
        IPv6Address(host)
    except ValueError:
        return host
    return f"[{host}]"


_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]")


@dataclass(frozen=True, slots=True)
class PeerBlocks:
    """The blocks of a request that a peer reported to hold."""

    source: PeerSource
    keys: frozenset[bytes]
    """Blocks by their names in tiers; see `offload.base.OffloadKey`."""


@dataclass(frozen=True, slots=True)
class RequestHasher:
    """How an engine hashes blocks; one for all its requests."""

    chain: HashChain
    hash_block_size: int
    """Tokens between two hashes; the cache's own."""


class CacheRequest:
    """One request, as the scheduler hands it to the cache manager.

    Tokens are only ever appended. `block_hashes[i]` identifies the first `(i + 1) *
    hash_block_size` tokens, and exists as soon as the last of them does.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        hasher: RequestHasher,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[ExtraKeys] = (),
        kv_transfer_params: Mapping[str, Any] | None = None,
        hints: RetentionHints = NO_HINTS,
        at_peer: PeerBlocks | None = None,
    ) -> None:
        """
        Args:
            request_id: Unique among the requests that hold blocks.
            lora_name: The adapter; keeps its blocks apart from those of other adapters.
            cache_salt: Keeps its blocks apart from those of requests with another salt.
            extra_keys: Further parts of a block's content, per hash block of the prompt:
                `(multimodal id, offset in the block)` pairs, and digests of embeddings or of an
                encoder's input as bytes.
            kv_transfer_params: For the lower tiers; see `RequestContext`.
            at_peer: Blocks of it that can be pulled.
        """
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        """Tokens whose KV is in the cache; set by the scheduler after each step, and to 0 on
        preemption."""
        self.shared_prefix_boundary = 0
        """Length of the prefix shared with earlier requests, found at admission; retained there
        under sparse retention."""
        self.hints = hints
        self.at_peer = at_peer
        self.lora_name = lora_name
        self.kv_transfer_params = kv_transfer_params
        self.block_hashes: list[bytes] = []
        self._cache_salt = cache_salt
        self._extra_keys = extra_keys
        self._hasher = hasher
        self._hash_full_blocks()

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the model generated."""
        self.token_ids += token_ids
        self._hash_full_blocks()

    def hash_at(self, end: int) -> bytes:
        """The hash of the first *end* tokens, a multiple of the hash block size."""
        return self.block_hashes[end // self._hasher.hash_block_size - 1]

    def extra_keys_between(self, start: int, end: int) -> ExtraKeys:
        """Return the parts of the block of `[start, end)` besides tokens, in the form of events.

        In this order: adapter, multimodal pairs with their offset in this block, salt, digests.

        Args:
            start: First token of the block, a multiple of the hash block size.
            end: Token behind its last, a multiple too.
        """
        return tuple(item for _, item in self._keys_between(start, end)) or None

    @property
    def has_extra_keys(self) -> bool:
        """Return whether anything besides tokens decides the content of its blocks."""
        return bool(self.lora_name is not None or self._cache_salt or self._extra_keys)

    def _hash_full_blocks(self) -> None:
        size, chain = self._hasher.hash_block_size, self._hasher.chain
        parent = self.block_hashes[-1] if self.block_hashes else None
        for start in range(len(self.block_hashes) * size, len(self.token_ids) - size + 1, size):
            extra = self._hashed_keys(start, start + size) if self.has_extra_keys else None
            parent = chain.block_hash(parent, self.token_ids[start : start + size], extra)
            self.block_hashes.append(parent)

    def _hashed_keys(self, start: int, end: int) -> ExtraKeys:
        # Each key is hashed with its kind, as in vLLM >= 0.31: a salt must not pass for an adapter
        # of the same name.
        keys = [
            (kind, *item) if isinstance(item, tuple) else (kind, item)
            for kind, item in self._keys_between(start, end)
        ]
        return tuple(keys) or None

    def _keys_between(self, start: int, end: int) -> list[tuple[str, object]]:
        """Return the parts of the block besides tokens, each key behind its kind."""
        size = self._hasher.hash_block_size
        items: list[object] = []
        for position in range(start, end, size):
            index = position // size
            here = (self._extra_keys[index] if index < len(self._extra_keys) else None) or ()
            items += [_shifted(item, position - start) for item in here]
        keys: list[tuple[str, object]] = (
            [] if self.lora_name is None else [("lora", self.lora_name)]
        )
        # An input that spans several hash blocks is listed in each; shifted to this block's start,
        # its entries are equal and become one.
        keys += [("mm", item) for item in dict.fromkeys(items) if isinstance(item, tuple)]
        if start == 0 and self._cache_salt:
            keys.append(("cache_salt", self._cache_salt))
        return keys + [("prompt_embeds", item) for item in items if not isinstance(item, tuple)]


def _shifted(item: object, offset: int) -> object:
    # The offset in a multimodal pair counts from the start of the block it is reported for.
    return (item[0], item[1] + offset) if isinstance(item, tuple) else item
