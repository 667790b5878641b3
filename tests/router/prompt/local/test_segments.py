"""The proof that pieces have the ids of the whole, and that each rule about cutting is needed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from router.prompt.local.backend import encode_all
from router.prompt.local.segmenter import Segmenter
from router.prompt.local.segments import (
    choose_segmenter,
    obstacle_in,
    segmenter_for,
    survives_self_test,
)
from router.prompt.local.tokenizer import LocalTokenizer

# Text that tokenizers have rules about: blanks of all kinds, composing accents, case that changes
# the length, emoji in several code points, control characters, marks of SentencePiece.
_FRAGMENTS = (
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\u3000",
        "\u00a0",
        "\u200b",
        "\x00",
        "▁",
        "▁▁",
        "_",
        ".",
    ),
    *(
        "Hello",
        " the",
        "word",
        "solo",
        "don't",
        "'s",
        "123",
        "4567",
        "e\u0301",
        "İ",
        "ß",
        "日本",
        "语",
    ),
    *("🙂\u200d", "<", "|>", "<0x0A>"),
)
_FAST = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


def _texts(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    """Long rows of fragments, whole added tokens, and their beginnings and ends."""
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    added = [content for content in contents if not content.startswith("<|reserved")]
    parts = [part for content in added for part in (content[:1], content[:-1], content[1:])]
    return st.lists(
        st.sampled_from([*added, *added, *_FRAGMENTS, *filter(None, parts)]), max_size=60
    ).map("".join)


def _ids_of_pieces(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    return [
        token_id
        for ids in encode_all(tokenizer, pieces, add_special_tokens=False)
        for token_id in ids
    ]


def _whole(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    # The library's plain call, which nothing under test goes through.
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


@settings(_FAST, max_examples=50)
@given(data=st.data())
def test_pieces_have_the_ids_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """This equality is all that allows the cache to exist."""
    segmenter, obstacle = choose_segmenter(tokenizer, obstacle_in(tokenizer.to_str().encode()))
    assert segmenter is not None, obstacle
    text = data.draw(_texts(tokenizer))
    pieces = segmenter.split(text)
    assert "".join(pieces) == text
    assert _ids_of_pieces(tokenizer, pieces) == _whole(tokenizer, text)


_TOKEN_TEXT = st.text("<>|ab_ A\n", min_size=1, max_size=4).filter(lambda text: bool(text.strip()))
_ADDED_TOKEN = st.builds(
    AddedToken,
    _TOKEN_TEXT,
    special=st.sampled_from([True, True, False]),
    normalized=st.sampled_from([False, False, False, True]),
    lstrip=st.sampled_from([False, False, False, True]),
    rstrip=st.sampled_from([False, False, False, True]),
    single_word=st.sampled_from([False, False, False, True]),
)
_NORMALIZERS = (
    None,
    normalizers.Lowercase(),
    normalizers.Strip(),
    normalizers.NFKC(),
    normalizers.Sequence([normalizers.Prepend("x"), normalizers.Replace(" ", "y")]),
)
_BYTES = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
_CHARS = {char: index for index, char in enumerate("<>|ab_ A▁\n.xy?")}


def _byte_model(add_prefix_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=_BYTES, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return tokenizer


def _char_model(prepend_scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=_CHARS, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    return tokenizer


_BARE_TOKENIZERS = (
    *(lambda flag=flag: _byte_model(flag) for flag in (False, True)),
    *(lambda scheme=scheme: _char_model(scheme) for scheme in ("first", "always", "never")),
)


@settings(_FAST, max_examples=150)
@given(
    build=st.sampled_from(_BARE_TOKENIZERS),
    normalizer=st.sampled_from(_NORMALIZERS),
    added=st.lists(_ADDED_TOKEN, min_size=1, max_size=6),
    data=st.data(),
)
def test_the_rules_hold_for_any_added_tokens(
    build: Callable[[], Tokenizer],
    normalizer: normalizers.Normalizer | None,
    added: list[AddedToken],
    data: st.DataObject,
) -> None:
    """The rules, without the self-test behind them: tokens that overlap, strip, want words around
    them, any of it."""
    tokenizer = build()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(added)
    segmenter = segmenter_for(list(tokenizer.get_added_tokens_decoder().values()))
    assume(segmenter is not None)
    assert segmenter is not None
    piece = st.sampled_from([token.content for token in added]) | st.sampled_from("<>|ab_ A\n")
    text = data.draw(st.lists(piece, max_size=30).map("".join))
    try:
        whole = _whole(tokenizer, text)
    except BaseException as panic:
        # The library itself crashes over some tokens that strip blanks which are tokens of their
        # own.
        assume(type(panic).__name__ != "PanicException")
        raise
    assert _ids_of_pieces(tokenizer, segmenter.split(text)) == whole


def test_overlaps_reach_anchors_over_several_tokens() -> None:
    """`b A` shares nothing with the anchor `|`, but takes the A that `A|A` needs to take the
    anchor."""
    tokenizer = _char_model("never")
    tokenizer.add_tokens([AddedToken("|", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("b A", normalized=False), AddedToken("A|A", normalized=False)])
    segmenter = segmenter_for(list(tokenizer.get_added_tokens_decoder().values()))
    assert segmenter is not None
    assert segmenter.split("ab A|A|A") == ["ab A", "|A|A"]
    assert _ids_of_pieces(tokenizer, segmenter.split("ab A|A|A")) == _whole(tokenizer, "ab A|A|A")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lstrip": True}, "a  <x>b"),
        ({"single_word": True}, "a<x> b"),
        ({"normalized": True}, "a<x>b"),
    ],
)
def test_tokens_that_look_at_their_neighbours_are_no_anchors(
    options: dict[str, bool], text: str
) -> None:
    """Cutting there gives other ids; the rule keeps these tokens inside their segment."""
    tokenizer = _byte_model(False)
    tokenizer.normalizer = normalizers.Prepend("y")
    tokenizer.add_tokens([AddedToken("<x>", **{"special": True, "normalized": False, **options})])
    assert segmenter_for(list(tokenizer.get_added_tokens_decoder().values())) is None
    assert _ids_of_pieces(tokenizer, Segmenter(["<x>"], ["<x>"]).split(text)) != _whole(
        tokenizer, text
    )


def test_a_token_that_begins_with_a_letter_is_no_anchor() -> None:
    """A `single_word` token before it asks whether a word goes on; cut off from it, the answer
    would change."""
    tokenizer = _byte_model(False)
    tokenizer.add_tokens([AddedToken("solo", special=True, normalized=False, single_word=True)])
    tokenizer.add_tokens([AddedToken("end", special=True, normalized=False)])
    assert segmenter_for(list(tokenizer.get_added_tokens_decoder().values())) is None
    assert _ids_of_pieces(
        tokenizer, Segmenter(["end"], ["end", "solo"]).split("soloend")
    ) != _whole(tokenizer, "soloend")


def test_a_segment_without_its_anchor_would_get_a_blank_in_front(
    build_tokenizer: Callable[[str], Tokenizer],
) -> None:
    """With `prepend_scheme: first` text after a token gets no blank; the anchor in front of it is
    what tells."""
    tokenizer = build_tokenizer("mistral")
    alone = ["<s>", "Hello"]
    assert _ids_of_pieces(tokenizer, alone) != _whole(tokenizer, "<s>Hello")
    assert _ids_of_pieces(tokenizer, ["<s>Hello"]) == _whole(tokenizer, "<s>Hello")


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({"model": {"type": "BPE", "dropout": 0.1}}, "random_model"),
        ({"model": {"type": "Unigram", "alpha": 0.1}}, "random_model"),
        ({"model": {"type": "Tomorrow"}}, "unknown_model"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Tomorrow"}]}},
            "unknown_normalizer",
        ),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Tomorrow"}]}},
            "unknown_pre_tokenizer",
        ),
    ],
)
def test_what_is_random_or_unknown_is_not_cut(change: dict[str, object], obstacle: str) -> None:
    """A component that did not exist when the rules were written may look at its neighbours."""
    file = {
        "model": {"type": "BPE"},
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel"},
    }
    assert obstacle_in(json.dumps(file).encode()) is None
    assert obstacle_in(json.dumps({**file, **change}).encode()) == obstacle


def test_special_tokens_that_are_split_as_text_forbid_cutting(
    build_tokenizer: Callable[[str], Tokenizer], local_of: Callable[..., LocalTokenizer]
) -> None:
    """With `split_special_tokens` a marker in the text is no border at all."""
    local = local_of(build_tokenizer("qwen"), splits_special_tokens=True)
    assert local.statistics().obstacle == "splits_special_tokens"


def test_a_tokenizer_without_special_tokens_is_not_cut() -> None:
    """There is nothing to cut at."""
    assert choose_segmenter(_byte_model(False), None) == (None, "no_anchor")


def test_the_self_test_catches_a_wrong_cut(tokenizer: Tokenizer) -> None:
    """Should a rule be wrong about a tokenizer that nobody has seen yet, the router must find out
    at load."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    right = choose_segmenter(tokenizer, None)[0]
    assert right is not None
    wrong = Segmenter([*right.anchors, "l"], [*added, "l"])
    assert survives_self_test(tokenizer, right, added)
    assert not survives_self_test(tokenizer, wrong, added)


@example("")
@example("a")
@given(text=st.text("a<|>", max_size=20))
def test_pieces_join_to_the_text(text: str) -> None:
    """Nothing may be lost at a cut, and no piece is empty."""
    pieces = Segmenter(["<|>"], ["<|>", "|>a"]).split(text)
    assert "".join(pieces) == text
    assert all(pieces)
