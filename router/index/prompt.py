"""Computes every key and hash that a source may know a prompt's prefixes by."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from kvevents.events import BlockHash
from kvevents.hashing import ExtraKeys, encode_cbor
from kvevents.sealing import held_key
from router._core import Core, EngineHashes, Prompt
from router._core import block_hashes as _block_hashes
from router.index.hash_finder import HashForm, engine_hashes

_BEFORE_EXTRA_KEYS = (bytes(16), (0,))
_PICKLED_AFTER = len(b"\x87\x94.")
_PICKLED_BEFORE = len(pickle.dumps((*_BEFORE_EXTRA_KEYS, None), protocol=5)) - 1 - _PICKLED_AFTER

_EngineHashes: TypeAlias = list[EngineHashes | list[BlockHash]]
"""Hashes in each spelling of extra keys."""
Computed: TypeAlias = tuple[int, bool, _EngineHashes]
"""Slot, whether places learned from events do not count, and the hashes in each spelling."""


def written_extra_keys(algorithm: str, extra_keys: Sequence[ExtraKeys]) -> list[bytes]:
    """Return extra keys as they are hashed for a block: `None` as no bytes."""
    write = encode_cbor if algorithm.endswith("_cbor") else _pickled_third
    return [b"" if each is None else write(each) for each in extra_keys]


def _pickled_third(value: Any) -> bytes:
    """A value as it stands in the pickle of a block, behind a digest and tokens: what is remembered
    there counts in references to what is remembered later."""
    before, after = _PICKLED_BEFORE, _PICKLED_AFTER
    return pickle.dumps((*_BEFORE_EXTRA_KEYS, value), protocol=5)[before:-after]


class HashedPrompt:
    """A prompt that an index has hashed. Only that index can match it.

    The core has its keys and most of its hashes; others are made here.
    """

    def __init__(
        self,
        core: Core,
        token_ids: Sequence[int],
        lora_name: str | None,
        cache_salt: str | None,
        extra_keys: Sequence[Any] | None,
    ) -> None:
        packed = msgspec.msgpack.encode(extra_keys) if extra_keys else b""
        self.hashed = Prompt(token_ids, lora_name, cache_salt, packed)
        self.lora_name = lora_name
        self._core = core
        self._salt = cache_salt
        self._extra_keys = extra_keys
        self._token_ids: array[int] | None = None
        self._keys: dict[int, Sequence[int]] = {}
        self._hashes: dict[HashForm, _EngineHashes] = {}

    @property
    def token_ids(self) -> Sequence[int]:
        """The token ids of the whole prompt; not kept twice unless they are asked for. Few callers
        do, and prompts are kept as long as a cache holds them."""
        if self._token_ids is None:
            self._token_ids = array("I", self.hashed.tokens())
        return self._token_ids

    def prefix_keys(self, step: int) -> Sequence[int]:
        """Keys that stand for the prompt's prefixes of *step*, 2 * *step*, ... tokens.

        Two prompts of one index have a key in common exactly where they have the prefix in common:
        tokens, adapter, salt and extra keys.
        """
        keys = self._keys.get(step)
        if keys is None:
            keys = self._keys[step] = self._core.prefix_keys(self.hashed, step)
        return keys

    def spellings(self, step: int) -> Iterator[Sequence[ExtraKeys]]:
        """The ways in which engines may hash the extra keys of blocks of *step* tokens."""
        blocks = -(-len(self.hashed) // step)
        return spellings(self._extra_keys, blocks, self.lora_name, self._salt)

    def core_hashes(self, form: HashForm) -> _EngineHashes:
        """Return `engine_hashes` in the form that the core looks up."""
        if form not in self._hashes:
            spellings = self.spellings(form.hash_block_size)
            self._hashes[form] = [self._hashed(form, extra_keys) for extra_keys in spellings]
        return self._hashes[form]

    def _hashed(
        self, form: HashForm, extra_keys: Sequence[ExtraKeys]
    ) -> EngineHashes | list[BlockHash]:
        chain = form.chain
        found: EngineHashes | list[BlockHash] | None
        if chain.key_id is not None:
            found = self._sealed(form, extra_keys)
        else:
            found = self._core.engine_hashes(
                *(self.hashed, chain.algorithm, chain.none_hash, *form[1:]),
                written_extra_keys(chain.algorithm, extra_keys),
            )
        return engine_hashes(form, self.token_ids, extra_keys) if found is None else found

    def _sealed(self, form: HashForm, extra_keys: Sequence[ExtraKeys]) -> list[BlockHash] | None:
        """Hashes under a key: the chain of the core, sealed here. None where that has no such
        chain, or its key is not known here."""
        chain, step, lookahead, _ = form
        key = held_key(chain.key_id or "")
        written = written_extra_keys(chain.algorithm, extra_keys)
        digests = _block_hashes(
            self.hashed, chain.algorithm, chain.none_hash, step, lookahead, written
        )
        count = max(0, len(self.hashed) - lookahead) // step
        if key is None or digests is None or not count:
            return None
        size = len(digests) // count
        return [key.seal(digests[at : at + size]) for at in range(0, len(digests), size)]


# --- what besides tokens decides a block ---------------------------------------------------------

# Engines carry it as *extra keys*, one entry a block. An engine's hash takes the entries as its
# version spells them; our keys take them as marks at tokens (core/index/marks.hpp).


def besides_lora(entry: Any, lora_name: str | None) -> Sequence[Any]:
    """A block's extra keys without the adapter's name.

    Args:
        entry: One block's; anything but a list holds no keys.
        lora_name: Left out where it comes first.
    """
    items = entry if isinstance(entry, (list, tuple)) else ()
    return items[1:] if items and lora_name is not None and items[0] == lora_name else items


def spellings(
    extra_keys: Sequence[Any] | None,
    blocks: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> Iterator[list[ExtraKeys]]:
    """The ways in which engines may spell the extra keys that they hash.

    vLLM <= 0.30 hashes the bare values; vLLM >= 0.31 tags them, and so does our engine. The
    adapter's path, which vLLM hashes too, cannot be seen from here.

    Args:
        extra_keys: One entry per block, in the events' untagged form.
        blocks: In the prompt, the last one perhaps cut short.
    """
    if not (lora_name or cache_salt or extra_keys):
        yield []
        return
    entries = [besides_lora(entry, lora_name) for entry in extra_keys or ()]
    entries += [()] * (blocks - len(entries))
    if cache_salt and cache_salt not in entries[0]:
        entries[0] = (*entries[0], cache_salt)
    adapter = (lora_name,) if lora_name else ()
    yield [plain((*adapter, *entry)) or None for entry in entries]
    tagged_adapter = (("lora", lora_name),) if lora_name else ()
    yield [(*tagged_adapter, *map(tagged, entry)) or None for entry in entries]


def tagged(item: Any) -> tuple[Any, ...]:
    """One extra key as vLLM >= 0.31 hashes it, with its kind."""
    if isinstance(item, (list, tuple)):
        return ("mm", *item)
    return ("prompt_embeds" if isinstance(item, bytes) else "cache_salt", item)


def plain(value: Any) -> Any:
    """Lists as tuples, all the way down: the form in which extra keys go into an engine's hash."""
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value
