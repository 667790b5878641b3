"""The local tokenizer answers the library's own ids, from the cache as well as without it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, processors

from router.prompt.errors import ModelFilesError, UntokenizableError
from router.prompt.local.backend import encode_all
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import TextPrompt
from router.prompt.token_ids import TokenIds, Truncation

_SETTINGS = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def _ids(local: LocalTokenizer, prompt: TextPrompt, salt: str | None = None) -> TokenIds:
    return local.finish(local.prepare(prompt, salt))


@pytest.fixture(scope="module", params=["native", "library"])
def local(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, local_of: Callable[..., LocalTokenizer]
) -> LocalTokenizer:
    return local_of(tokenizer, use_native=request.param == "native")


@_SETTINGS
@given(data=st.data(), add_special_tokens=st.booleans())
def test_first_and_repeated_answers_are_the_library_s(
    tokenizer: Tokenizer, local: LocalTokenizer, data: st.DataObject, add_special_tokens: bool
) -> None:
    """BOS and EOS included: whatever the post-processor does to the whole is done to the pieces."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    text = "".join(
        data.draw(st.lists(st.sampled_from([*added, " ", "Hello", "\n", "dog ", "é"]), max_size=20))
    )
    prompt = TextPrompt(text, add_special_tokens)
    expected = array("I", tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    assert _ids(local, prompt) == expected
    assert _ids(local, prompt) == expected


@pytest.fixture
def chat_local(
    build_tokenizer: Callable[[str], Tokenizer], local_of: Callable[..., LocalTokenizer]
) -> LocalTokenizer:
    return local_of(build_tokenizer("qwen"), use_native=False)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the tokenizer runs over."""
    seen: list[str] = []

    def encode(backend: Tokenizer, texts: Sequence[str], **options: bool) -> list[TokenIds]:
        seen.extend(texts)
        return encode_all(backend, texts, **options)

    monkeypatch.setattr("router.prompt.local.cache.encode_all", encode)
    return seen


def _conversation(turns: int) -> str:
    return "".join(f"<|im_start|>user\nquestion number {turn}<|im_end|>\n" for turn in range(turns))


def test_the_next_turn_costs_only_its_new_part(
    chat_local: LocalTokenizer, encoded: list[str]
) -> None:
    """The purpose of the cache: a conversation of any length is tokenised once."""
    header = "<|im_start|>assistant\n"
    _ids(chat_local, TextPrompt(_conversation(50) + header))
    encoded.clear()
    new = _conversation(51).removeprefix(_conversation(50))
    _ids(chat_local, TextPrompt(_conversation(51) + header))
    assert "".join(encoded) == new.removesuffix("<|im_end|>\n")


def test_equal_segments_of_one_prompt_are_tokenised_once(
    chat_local: LocalTokenizer, encoded: list[str]
) -> None:
    """Turn markers repeat in every message."""
    _ids(chat_local, TextPrompt("<|im_end|>\n" * 1000))
    assert encoded == ["<|im_end|>\n"]


def test_salts_do_not_share_segments(chat_local: LocalTokenizer, encoded: list[str]) -> None:
    """A tenant must not learn from a faster answer what another tenant has sent."""
    prompt = TextPrompt("<|im_start|>a secret<|im_end|>")
    for salt in ("one", "two", None):
        encoded.clear()
        _ids(chat_local, prompt, salt)
        assert encoded


def test_callers_can_change_what_they_got(chat_local: LocalTokenizer) -> None:
    """The answer is the caller's own; the cached segment must not change with it."""
    prompt = TextPrompt("<|im_start|>a single segment")
    first = _ids(chat_local, prompt)
    expected = array("I", first)
    first[0] = 0
    assert _ids(chat_local, prompt) == expected


def test_a_cache_too_small_changes_nothing_but_the_time(
    build_tokenizer: Callable[[str], Tokenizer],
) -> None:
    """Eviction between looking up and joining must not lose a segment."""
    tokenizer = build_tokenizer("qwen")
    files = ModelFiles(path="test", tokenizer_json=tokenizer.to_str().encode())
    for cache_bytes in (0, 1000, 2000):
        local = LocalTokenizer(files, use_native=False, cache_bytes=cache_bytes)
        text = _conversation(30)
        for _ in range(2):
            assert _ids(local, TextPrompt(text)).tolist() == tokenizer.encode(text).ids
        cache = local.statistics().cache
        assert cache is not None
        assert cache.held_bytes <= cache_bytes


@pytest.mark.parametrize("use_native", [True, False])
def test_a_million_tokens_are_tokenised(
    build_tokenizer: Callable[[str], Tokenizer],
    local_of: Callable[..., LocalTokenizer],
    use_native: bool,
) -> None:
    """The longest contexts that models have."""
    chat_local = local_of(build_tokenizer("qwen"), use_native=use_native)
    text = (
        "".join(f"<|im_start|>user\n{turn}{' the quick' * 1000}<|im_end|>\n" for turn in range(260))
        * 2
    )
    assert len(_ids(chat_local, TextPrompt(text))) > 1_000_000


def test_more_tokens_than_the_limit_are_refused(
    build_tokenizer: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for more gets no ids, and nothing larger than the limit is handed on."""
    monkeypatch.setattr("router.prompt.local.tokenizer.MAX_PROMPT_TOKENS", 3)
    files = ModelFiles(path="test", tokenizer_json=build_tokenizer("qwen").to_str().encode())
    local = LocalTokenizer(files)
    assert len(_ids(local, TextPrompt("<think>" * 3))) == 3
    with pytest.raises(UntokenizableError, match="prompt_too_long"):
        _ids(local, TextPrompt("<think>" * 4))


@pytest.mark.parametrize("name", ["llama3", "bert", "unigram"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count", [0, 3, 4, 8, 1000])
def test_truncation_without_a_side_is_the_tokenizer_s_own(
    build_tokenizer: Callable[[str], Tokenizer],
    local_of: Callable[..., LocalTokenizer],
    name: str,
    side: str,
    count: int,
) -> None:
    """The special tokens stay and the text gives way, as the library does it for the engine."""
    tokenizer = Tokenizer.from_str(build_tokenizer(name).to_str())
    text = "the quick brown fox jumps over the lazy dog"
    truncation = Truncation(
        count, "left" if side == "left" else "right", counts_special_tokens=False
    )
    ids = _ids(local_of(tokenizer), TextPrompt(text, truncation=truncation))
    if count:
        tokenizer.enable_truncation(count, direction=side)
    expected = tokenizer.encode(text).ids if count else tokenizer.encode("").ids
    assert ids.tolist() == expected


def test_truncation_with_a_side_cuts_the_finished_ids(
    build_tokenizer: Callable[[str], Tokenizer], local_of: Callable[..., LocalTokenizer]
) -> None:
    """Where the client names the side, the engine slices, special tokens and all."""
    tokenizer = build_tokenizer("bert")
    text = "the quick brown fox"
    whole = tokenizer.encode(text).ids
    for side, expected in (("left", whole[-3:]), ("right", whole[:3])):
        truncation = Truncation(
            3, "left" if side == "left" else "right", counts_special_tokens=True
        )
        assert (
            _ids(local_of(tokenizer), TextPrompt(text, truncation=truncation)).tolist() == expected
        )


def test_ends_that_depend_on_the_text_are_left_to_the_library(
    build_tokenizer: Callable[[str], Tokenizer], local_of: Callable[..., LocalTokenizer]
) -> None:
    """A template that writes the text twice has no fixed ends; the whole is tokenised as the
    library does it."""
    tokenizer = Tokenizer.from_str(build_tokenizer("llama2").to_str())
    bos = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <s> $A", special_tokens=bos
    )
    local = local_of(tokenizer)
    for text in ("", "fox", "[INST] dog [/INST]"):
        assert _ids(local, TextPrompt(text)).tolist() == tokenizer.encode(text).ids


def test_a_model_that_draws_at_random_is_refused(
    build_tokenizer: Callable[[str], Tokenizer], local_of: Callable[..., LocalTokenizer]
) -> None:
    """Its ids here are not its ids there; to claim them as exact would be a lie."""
    state = json.loads(build_tokenizer("qwen").to_str())
    state["model"]["dropout"] = 0.5
    local = local_of(Tokenizer.from_str(json.dumps(state)))
    with pytest.raises(UntokenizableError, match="random_model"):
        local.prepare(TextPrompt("text"), None)


def test_a_crash_in_the_library_is_an_error_of_ours(capfd: pytest.CaptureFixture[str]) -> None:
    """A panic in Rust is no `Exception`: it would go through every handler of a server."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={char: index for index, char in enumerate("ab \n?")}, merges=[], unk_token="?"
        )
    )
    tokenizer.add_tokens(
        [
            AddedToken("<r>", rstrip=True, normalized=False),
            AddedToken("\n", lstrip=True, normalized=False),
        ]
    )
    local = LocalTokenizer(ModelFiles(path="test", tokenizer_json=tokenizer.to_str().encode()))
    with pytest.raises(UntokenizableError, match="tokenizer_crashed"):
        _ids(local, TextPrompt("<r>\n\na"))
    capfd.readouterr()
    assert _ids(local, TextPrompt("ab")).tolist() == [0, 1]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"model": 1}', b"\xff"])
def test_a_file_that_is_no_tokenizer_is_named(content: bytes) -> None:
    """The operator reads which file it is."""
    with pytest.raises(ModelFilesError, match=r"test/tokenizer\.json"):
        LocalTokenizer(ModelFiles(path="test", tokenizer_json=content))
