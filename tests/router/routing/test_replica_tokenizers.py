"""Every replica is asked whether it tokenises as the router does."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from router.config.replica import ReplicaConfig
from router.config.watch import HealthConfig
from router.fleet.load import LoadTracker
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.fleet.watchers import Watchers
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import read_model_files
from router.routing.replica_tokenizers import TokenizerCheck


def trained(directory: Path, corpus: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [corpus],
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.fixture
def local(tmp_path: Path) -> LocalTokenizer:
    trained(tmp_path / "model", "the answer is the answer to the question")
    return LocalTokenizer(read_model_files(tmp_path / "model"))


async def result_of(check: TokenizerCheck, local: LocalTokenizer) -> dict[tuple[str, str], int]:
    """Start a check of one replica and wait until it is over."""
    health, load = HealthConfig(), LoadTracker()
    registry = ReplicaRegistry(Watchers(_refuse, health, load), health, load)
    replica = registry.add(ReplicaConfig(url="http://127.0.0.1:9", id="r", models=("m",)))
    try:
        check.start(replica, "m", local)
        await asyncio.gather(
            *(task for task in asyncio.all_tasks() if task.get_name() == "tokenizer r")
        )
    finally:
        await registry.close()
    return check.disagreements


async def _refuse(*_arguments: object) -> tuple[int, bytes]:
    raise ConnectionRefusedError


def engine(tokenizer: Tokenizer) -> TokenizerCheck:
    """A replica's /tokenize, as far as plain text goes."""

    async def ask(_replica: Replica, _path: str, body: bytes) -> tuple[int, bytes]:
        text = msgspec.json.decode(body).get("prompt")
        if text is None:
            return 400, b"{}"
        return 200, msgspec.json.encode({"tokens": tokenizer.encode(text).ids})

    return TokenizerCheck(ask)


async def test_a_replica_with_the_same_tokenizer_agrees(
    local: LocalTokenizer, tmp_path: Path
) -> None:
    """The usual case says nothing."""
    same = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert await result_of(engine(same), local) == {("m", "r"): 0}


async def test_a_replica_with_another_tokenizer_is_named(
    local: LocalTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else would say why no hit ever comes true."""
    other = trained(tmp_path / "other", "zzz yyy xxx zzz yyy xxx 42 42 42")
    with caplog.at_level(logging.WARNING):
        found = await result_of(engine(other), local)
    assert found["m", "r"] > 0
    assert "replica r tokenises m differently" in caplog.text


async def test_a_replica_that_cannot_be_asked_proves_nothing(local: LocalTokenizer) -> None:
    """No result is not a good one."""
    assert await result_of(TokenizerCheck(_refuse), local) == {}


async def test_a_replica_that_is_gone_is_forgotten(local: LocalTokenizer, tmp_path: Path) -> None:
    """Its series must vanish from the metrics."""
    check = engine(Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json")))
    await result_of(check, local)
    check.forget("r")
    assert check.disagreements == {}


@pytest.mark.parametrize("reads_effort", [True, False])
async def test_replicas_that_write_harmony_are_known(tmp_path: Path, reads_effort: bool) -> None:
    """Before vLLM 0.33 they return what gpt-oss's template makes of a chat, which is not what they
    compute: one of them, and none is asked."""
    trained(tmp_path / "model", "the answer is the answer to the question")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt_oss"}')
    local = LocalTokenizer(read_model_files(tmp_path / "model"))

    async def ask(_replica: Replica, _path: str, body: bytes) -> tuple[int, bytes]:
        effort = msgspec.json.decode(body).get("chat_template_kwargs", {}).get("reasoning_effort")
        return (
            200,
            b'{"tokens": [1, 2]}' if effort == "low" and reads_effort else b'{"tokens": [1]}',
        )

    check = TokenizerCheck(ask)
    assert not check.all_write_harmony("m")
    await result_of(check, local)
    assert check.all_write_harmony("m") is not reads_effort
    check.forget("r")
    assert not check.all_write_harmony("m")
