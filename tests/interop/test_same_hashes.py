"""Block hashes: `kvevents.hashing` and our requests compared with vLLM's own hasher."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvevents.hashing import HashChain
from offload.request import CacheRequest, RequestHasher
from tests.interop.vllm_cache import build_request

TOKENS = [Random(7).randrange(200_000) for _ in range(1000)]
ADAPTER = LoRARequest("sql", 1, "/adapters/sql")


def vllm_hashes(algorithm: str, size: int, **options: Any) -> list[bytes]:
    hash_function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_function)
    hasher = kv_cache_utils.get_request_block_hasher(size, hash_function)
    return [
        bytes(block_hash)
        for block_hash in build_request("r", TOKENS, hasher, **options).block_hashes
    ]


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_the_chain_of_a_prompt_is_vllms_with_its_default_seed(algorithm: str, size: int) -> None:
    """A router that computes hashes itself finds an engine's blocks only if every digest is
    equal."""
    assert list(HashChain.from_seed(algorithm).block_hashes(TOKENS, size)) == vllm_hashes(
        algorithm, size
    )


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_a_seed_that_is_set_gives_the_same_chain(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators set PYTHONHASHSEED on their engines to make hashes equal across replicas."""
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    assert list(HashChain.from_seed(algorithm, "42").block_hashes(TOKENS, 16)) == vllm_hashes(
        algorithm, 16
    )


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_adapter_and_salt_hashed_as_tagged_keys_give_vllms_hashes(algorithm: str) -> None:
    """The adapter goes into every block, with its path; the salt only into the first one."""
    adapter = ("lora", "sql", "/adapters/sql")
    extra_keys = [(adapter, ("cache_salt", "tenant")), *[(adapter,)] * 100]
    mine = list(HashChain.from_seed(algorithm).block_hashes(TOKENS, 16, extra_keys))
    assert mine == vllm_hashes(algorithm, 16, salt="tenant", lora_request=ADAPTER)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_our_request_names_its_blocks_as_vllms_request_does(
    algorithm: str, salt: str | None
) -> None:
    """An engine can replace its cache manager with ours and keep what a lower tier holds under
    these hashes."""
    hasher = RequestHasher(HashChain.from_seed(algorithm), 16)
    assert CacheRequest("r", TOKENS, hasher, cache_salt=salt).block_hashes == vllm_hashes(
        algorithm, 16, salt=salt
    )


def test_an_appended_token_completes_the_same_block() -> None:
    """Decoded tokens are hashed as they are generated; the chain must not depend on where the
    prompt ended."""
    hasher = RequestHasher(HashChain.from_seed("sha256"), 16)
    request = CacheRequest("r", TOKENS[:500], hasher)
    for token in TOKENS[500:]:
        request.append([token])
    assert request.block_hashes == vllm_hashes("sha256", 16)


def test_a_salt_and_an_adapter_of_the_same_name_share_no_block() -> None:
    """What one tenant computed with an adapter is wrong for another without it, whatever the salt
    is called."""
    hasher = RequestHasher(HashChain.from_seed("sha256"), 16)
    adapter = CacheRequest("a", TOKENS, hasher, lora_name="x").block_hashes
    salted = CacheRequest("s", TOKENS, hasher, cache_salt="x").block_hashes
    assert not set(adapter) & set(salted)
