"""The models: each with an index that can follow what its replicas share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from router.config.models import ModelConfig, StoreConfig
from router.errors import UnknownModel
from router.index.layout_learner import StoreHint
from router.prompt.body.requests import parse_request
from router.prompt.endpoints import Endpoint
from router.routing.models import ModelSet
from tests.support.model_files import write_byte_tokenizer


async def no_replica(names: Sequence[str], path: str, body: bytes) -> tuple[int, bytes]:
    raise AssertionError(f"{names} {path} {len(body)}")


STORES = (StoreConfig(name="fs", tiers=("STORAGE",), replicas=("a-*",)), StoreConfig(name="pool"))


def test_a_replica_is_told_of_the_stores_that_it_shares() -> None:
    """Another one may have the same disk's name, and a disk of its own."""
    models = ModelSet([ModelConfig(name="m", stores=STORES)], no_replica)
    model, _ = models.resolve("m")
    shared, pool = StoreHint("fs", ("STORAGE",)), StoreHint("pool")
    assert model.hints_of("a-1").stores == (shared, pool)
    assert model.hints_of("b-1").stores == (pool,)
    assert model.hints_of("b-1").hash_seeds == model.hints.hash_seeds


def test_an_adapter_may_be_named_with_its_model() -> None:
    """SGLang's clients name it so, and under its own name alone SGLang computes the base model."""
    models = ModelSet(
        [ModelConfig(name="s3://m", aliases=("short",), lora_adapters=("a:1",))], no_replica
    )
    models.discover("other")
    for name in ("a:1", "s3://m:a:1", "short:a:1"):
        model, adapter = models.resolve(name)
        assert (model.name, adapter) == ("s3://m", "a:1")
    for name in ("other:a:1", "s3://m:b", "s3://m:", ":a:1", "s3://m:short", "s3://m:s3://m"):
        with pytest.raises(UnknownModel):
            models.resolve(name)


def test_templates_get_what_the_operator_says_of_them(tmp_path: Path) -> None:
    """The engines' own template, and their own variables of it."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}{{ mood }}")
    config = ModelConfig(
        name="m",
        tokenizer=str(tmp_path),
        chat_template=str(tmp_path / "own.jinja"),
        chat_template_kwargs={"mood": "!"},
    )
    models = ModelSet([config], no_replica)
    model, _ = models.resolve("m")
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    tokenization = models.tokenization_of(model)
    (found,) = tokenization.tokenize_now(parse_request(Endpoint.CHAT, body)) or ()
    assert bytes(found.token_ids.tolist()) == b"hi!"
    models.close()
