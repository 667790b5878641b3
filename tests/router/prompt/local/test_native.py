"""fastokens tokenises where its ids are the library's, and nowhere else."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer

from router.config.schema import RouterConfig
from router.prompt.errors import UntokenizableError
from router.prompt.local import native
from router.prompt.local.native import (
    TEST_TEXTS,
    NativeTokenizer,
    load_native,
    reason_against,
    survives_self_test,
)
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import TextPrompt
from router.prompt.tokenization import Tokenization
from router.serve.server import render_metrics
from router.serve.service import RouterService

LISTED = ("llama3", "qwen", "llama2", "gemma", "phi3")
NOT_LISTED = {
    "gpt2": "pre_tokenizer",
    "mistral": "pre_tokenizer",
    "unigram": "model",
    "bert": "model",
    "awkward": "normalizer",
    "llama2_with_gaps": "self_test",
}

_TokenizerOf = Callable[[str], Tokenizer]
_LocalOf = Callable[..., LocalTokenizer]


def _loaded(tokenizer: Tokenizer) -> NativeTokenizer:
    found = load_native(tokenizer)
    assert isinstance(found, NativeTokenizer), found
    return found


@pytest.mark.parametrize("name", LISTED)
def test_listed_tokenizers_are_tokenised_by_fastokens(
    build_tokenizer: _TokenizerOf, local_of: _LocalOf, name: str
) -> None:
    """Thirty times as fast: whoever can have it gets it."""
    local = local_of(build_tokenizer(name))
    assert local.backend == ("fastokens", None)
    assert local.statistics().cache is None


@pytest.mark.parametrize(("name", "reason"), NOT_LISTED.items())
def test_other_tokenizers_keep_the_library_and_say_why(
    build_tokenizer: _TokenizerOf, local_of: _LocalOf, name: str, reason: str
) -> None:
    """fastokens answers other ids for some of them, without an error."""
    local = local_of(build_tokenizer(name))
    assert local.backend == ("tokenizers", reason)
    assert str(local.backend) == f"tokenizers ({reason})"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(LISTED), data=st.data())
def test_any_text_has_the_library_s_ids(
    build_tokenizer: _TokenizerOf, name: str, data: st.DataObject
) -> None:
    """One wrong id costs every block behind it."""
    tokenizer = build_tokenizer(name)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    character = st.characters(exclude_categories=["Cs"])
    pieces = data.draw(st.lists(st.sampled_from(added) | st.text(character), max_size=12))
    text = "".join(pieces)
    expected = array("I", tokenizer.encode(text, add_special_tokens=False).ids)
    assert _loaded(tokenizer).encode(text) == expected


_WORD = r"\w+|\W"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "NFKC"}}, "normalizer"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer"),
        ({"pre_tokenizer": None}, "pre_tokenizer"),
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
            "pre_tokenizer",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": _WORD},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "pre_tokenizer",
        ),
        ({"model": {"continuing_subword_prefix": "##"}}, "model"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "model"),
        ({"model": {"byte_fallback": True}}, "pre_tokenizer"),
    ],
)
def test_a_listed_tokenizer_with_one_other_part_is_not_listed(
    build_tokenizer: _TokenizerOf, parts: dict[str, Any], reason: str
) -> None:
    """What was compared is the form as a whole."""
    qwen = build_tokenizer("qwen")
    assert reason_against(qwen.to_str()) is None
    state = json.loads(qwen.to_str())
    model = {**state["model"], **parts.get("model", {})}
    assert reason_against(json.dumps({**state, **parts, "model": model})) == reason


def test_options_of_offsets_do_not_matter(build_tokenizer: _TokenizerOf) -> None:
    """Llama 3's and Qwen's files differ in them; ids do not."""
    state = json.loads(build_tokenizer("qwen").to_str())
    for trim_offsets in (True, False):
        state["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = trim_offsets
        assert reason_against(json.dumps(state)) is None


def test_special_tokens_split_as_text_keep_the_library(
    build_tokenizer: _TokenizerOf, local_of: _LocalOf
) -> None:
    """A way that was not compared."""
    local = local_of(build_tokenizer("qwen"), splits_special_tokens=True)
    assert local.backend == ("tokenizers", "splits_special_tokens")


def test_added_tokens_with_gaps_between_their_ids_have_the_library_s_ids(
    build_tokenizer: _TokenizerOf,
) -> None:
    """The library numbers them anew, fastokens would believe the file."""
    state = json.loads(build_tokenizer("qwen").to_str())
    for token in state["added_tokens"][2:]:
        token["id"] += 50
    tokenizer = Tokenizer.from_str(json.dumps(state))
    text = "<|im_end|>a<think>"
    assert _loaded(tokenizer).encode(text).tolist() == tokenizer.encode(text).ids


def test_the_post_processor_is_the_library_s_again_after_loading(
    build_tokenizer: _TokenizerOf,
) -> None:
    """Whoever gave the tokenizer still has it whole."""
    tokenizer = Tokenizer.from_str(build_tokenizer("llama3").to_str())
    before = tokenizer.to_str()
    _loaded(tokenizer)
    assert tokenizer.to_str() == before


# --- the self-test --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTED)
def test_a_tokenizer_that_differs_in_one_token_fails_the_self_test(
    build_tokenizer: _TokenizerOf, name: str
) -> None:
    """A form that is listed and still wrong, a library that is broken: found at load."""
    tokenizer = build_tokenizer(name)
    other = Tokenizer.from_str(tokenizer.to_str())
    other.add_tokens([AddedToken(" quick", normalized=False)])
    assert survives_self_test(_loaded(tokenizer), tokenizer)
    assert not survives_self_test(_loaded(tokenizer), other)


def test_the_self_test_draws_the_same_thousands_of_texts_each_time(
    build_tokenizer: _TokenizerOf,
) -> None:
    """A start that fails today must not succeed tomorrow; and each kind of text comes up."""
    tokenizer = build_tokenizer("qwen")
    texts = list(native._test_texts(tokenizer))
    assert texts == list(native._test_texts(tokenizer))
    assert len(set(texts)) > 0.9 * TEST_TEXTS
    seen = "".join(texts)
    assert all(fragment in seen for fragment in native._FRAGMENTS)
    assert all(token.content in seen for token in tokenizer.get_added_tokens_decoder().values())


def test_what_fails_the_self_test_is_tokenised_by_the_library(
    build_tokenizer: _TokenizerOf, local_of: _LocalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is shown; the ids stay right."""

    class Wrong(NativeTokenizer):
        def encode(self, text: str) -> array[int]:
            return super().encode(text.replace("\u180e", " "))

    monkeypatch.setattr(native, "NativeTokenizer", Wrong)
    tokenizer = Tokenizer.from_str(build_tokenizer("qwen").to_str())
    tokenizer.add_special_tokens(["<|of this test|>"])
    local = local_of(tokenizer)
    assert local.backend == ("tokenizers", "self_test")
    text = "a\u180eb"
    assert local.finish(local.prepare(TextPrompt(text), None)).tolist() == (
        tokenizer.encode(text).ids
    )


def test_without_fastokens_the_library_tokenises(
    build_tokenizer: _TokenizerOf, local_of: _LocalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no wheel of it, the router works as before."""
    monkeypatch.setattr(native, "fastokens", None)
    assert local_of(build_tokenizer("qwen")).backend == ("tokenizers", "not_installed")


# --- who is told ----------------------------------------------------------------------------------


async def test_metrics_overview_and_log_say_what_tokenises_and_why(
    build_tokenizer: _TokenizerOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that tokenises slowly shows in one query, with the reason."""
    for name in ("qwen", "bert"):
        (tmp_path / name).mkdir()
        build_tokenizer(name).save(str(tmp_path / name / "tokenizer.json"))
    models = [{"name": name, "tokenizer": str(tmp_path / name)} for name in ("qwen", "bert")]
    models.append({**models[0], "name": "careful", "tokenizer_library": "tokenizers"})
    config = RouterConfig.model_validate({"models": [*models, {"name": "other"}]})
    with caplog.at_level("INFO", "router.routing.models"):
        service = RouterService(config)
    assert caplog.messages == [
        "model qwen: tokenised by fastokens",
        "model bert: tokenised by tokenizers (model)",
        "model careful: tokenised by tokenizers (configured)",
    ]
    assert service.models.tokenizers() == {
        "qwen": "fastokens",
        "bert": "tokenizers (model)",
        "careful": "tokenizers (configured)",
        "other": "replica",
    }
    async with service.lifespan():
        text = (await render_metrics(service)).decode()
    found = {
        (sample.labels["model"], sample.labels["library"], sample.labels["reason"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvroute_tokenizer_info"
    }
    assert found == {
        ("qwen", "fastokens", ""),
        ("bert", "tokenizers", "model"),
        ("careful", "tokenizers", "configured"),
    }
    assert 'kvroute_token_cache_hits_total{model="bert"}' in text
    assert 'kvroute_token_cache_hits_total{model="qwen"}' not in text


# --- sharing, threads, errors ---------------------------------------------------------------------


def test_models_with_one_tokenizer_share_it_as_long_as_one_of_them_lives(
    build_tokenizer: _TokenizerOf,
) -> None:
    """Twice the memory and twice the time to load for nothing; and nothing stays for ever."""
    tokenizer = Tokenizer.from_str(build_tokenizer("qwen").to_str())
    tokenizer.add_special_tokens(["<|shared|>"])
    first, second = _loaded(tokenizer), _loaded(tokenizer)
    assert first is second
    held = weakref.ref(first)
    assert held() is not None
    del first, second
    gc.collect()
    assert held() is None


def test_threads_have_the_same_ids(build_tokenizer: _TokenizerOf) -> None:
    """One object serves the event loop and the threads beside it."""
    tokenizer = build_tokenizer("llama3")
    shared, texts = _loaded(tokenizer), [f"number {count} " * 50 for count in range(40)]
    found: dict[int, list[list[int]]] = {}

    def tokenise(index: int) -> None:
        found[index] = [shared.encode(text).tolist() for text in texts]

    threads = [threading.Thread(target=tokenise, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [found[index] for index in range(4)] == [expected] * 4


async def test_every_thread_is_warm_before_the_first_prompt(
    build_tokenizer: _TokenizerOf,
) -> None:
    """A thread's first text takes 50 ms and more: no request should pay for it."""
    warmed: set[int] = set()
    all_warm = threading.Event()

    class Watched(LocalTokenizer):
        def warm_thread(self) -> None:
            super().warm_thread()
            warmed.add(threading.get_ident())
            if len(warmed) == 4:
                all_warm.set()

    tokenizer_json = build_tokenizer("qwen").to_str().encode()
    local = Watched(ModelFiles(path="test", tokenizer_json=tokenizer_json))
    assert warmed == {threading.get_ident()}
    tokenization = Tokenization(local=local, max_threads=3)
    assert await asyncio.to_thread(all_warm.wait, 30)
    tokenization.close()


def test_text_that_is_not_unicode_is_an_error_of_ours(
    build_tokenizer: _TokenizerOf, local_of: _LocalOf
) -> None:
    """JSON text inside a message can spell half of a surrogate pair."""
    local = local_of(build_tokenizer("qwen"))
    with pytest.raises(UntokenizableError, match="not_unicode"):
        local.finish(local.prepare(TextPrompt("\ud800"), None))
