"""Finds where a text may be cut so that its pieces, tokenised one by one, give the whole's ids.

The tokenizers library works in this order: (1) find the added tokens that are not `normalized` in
the raw text, leftmost-longest; (2) normalise every piece between them on its own and find the
`normalized` added tokens in it; (3) pre-tokenise every piece on its own; (4) run the model on
every word. After step 1 nothing looks across an added token, with the few exceptions below, so a
text can be cut in front of one. A segment is an added token and the text up to the next one; only
the first segment may start with text.

Rules, each with its reason. A token is an *anchor*, that is, a place to cut in front of, if it

- is `special`: chat markers are, and cutting at every `<td>` that a vocabulary holds would only
  cost time;
- is not `normalized`: the others are found in step 2, inside a piece, after the text has changed;
- is not `lstrip`: it takes the blanks before it, which belong to the segment before;
- is not `single_word`: whether it counts depends on the character before it;
- begins with ASCII punctuation other than `_`: a `single_word` token at the end of the segment
  before asks whether a word goes on, an `rstrip` token there takes all blanks that follow; at
  such a character both stop, as at the end of a text.

`rstrip` anchors are fine: what they take lies in their own segment. Overlapping added tokens are
fine: the anchors are found among all tokens that could overlap one, with the library's own rule.
`Metaspace` with `prepend_scheme: first` writes its blank only at offset 0 of the whole text; in
a segment that begins with its anchor the text has an offset above 0 as it has in the whole, and the
first segment begins at 0 in both. A `Prepend` normalizer and `ByteLevel` with
`add_prefix_space` act on every piece alike.

The whole text is tokenised at once, uncut, if

- no token is an anchor;
- special tokens are split as plain text (`split_special_tokens`) and so are not boundaries;
- a normalizer, pre-tokenizer or model is of an unknown kind, which might look at its neighbours;
- the model draws at random (BPE `dropout`, Unigram `alpha`): no two runs agree;
- the self-test at load finds a text whose pieces give other ids than the whole.
"""

from __future__ import annotations

import string
from array import array
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from router.prompt.errors import UntokenizableError
from router.prompt.local.backend import encode_all
from router.prompt.local.segmenter import Segmenter

_ANCHOR_STARTS = frozenset(string.punctuation) - {"_"}

_KNOWN_NORMALIZERS = frozenset(
    (
        *("Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase"),
        *("Strip", "StripAccents", "Replace", "Prepend"),
        *("Precompiled", "BertNormalizer", "Nmt", "ByteLevel"),
    )
)
_KNOWN_PRE_TOKENIZERS = frozenset(
    (
        *("Sequence", "ByteLevel", "Split", "Metaspace"),
        *("Whitespace", "WhitespaceSplit", "BertPreTokenizer"),
        *("Punctuation", "Digits", "UnicodeScripts", "CharDelimiterSplit", "FixedLength"),
    )
)
_KNOWN_MODELS = frozenset(("BPE", "Unigram", "WordPiece", "WordLevel", ""))


class _Model(msgspec.Struct):
    """The part of `model` that matters; vocabulary and merges are skipped unread."""

    type: str = ""
    dropout: float | None = None
    alpha: float | None = None
    nbest_size: int | None = None


class _TokenizerFile(msgspec.Struct):
    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


RANDOM_MODEL = "random_model"


def obstacle_in(tokenizer_json: bytes) -> str | None:
    """Return which component of a tokenizer forbids to cut texts; None where none does. Its added
    tokens are judged by `segmenter_for`. Two runs of a `RANDOM_MODEL` over the same text may give
    different ids.

    Raises:
        msgspec.MsgspecError: The file is not of the form of a tokenizer.
    """
    file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    model = file.model
    if model.dropout or model.alpha is not None or model.nbest_size is not None:
        return RANDOM_MODEL
    if model.type not in _KNOWN_MODELS:
        return "unknown_model"
    if not _types(file.normalizer, "normalizers") <= _KNOWN_NORMALIZERS:
        return "unknown_normalizer"
    if not _types(file.pre_tokenizer, "pretokenizers") <= _KNOWN_PRE_TOKENIZERS:
        return "unknown_pre_tokenizer"
    return None


def _types(component: object, children: str) -> set[str]:
    """Return the types of a component and of everything it is made of."""
    if not isinstance(component, dict):
        return set()
    types = {str(component.get("type", "unknown"))}
    for child in component.get(children) or ():
        types |= _types(child, children)
    return types


def segmenter_for(added_tokens: Sequence[AddedToken]) -> Segmenter | None:
    """Find the anchors among the added tokens; None without any.

    Raises:
        RecursionError: The tokens are nested too deep to be compiled.
    """
    raw = [token for token in added_tokens if not token.normalized]
    anchors = [token.content for token in raw if _is_anchor(token)]
    return (
        Segmenter(anchors, _overlapping(anchors, [token.content for token in raw]))
        if anchors
        else None
    )


def _is_anchor(token: AddedToken) -> bool:
    return (
        token.special
        and not token.normalized
        and not token.lstrip
        and not token.single_word
        and token.content[:1] in _ANCHOR_STARTS
    )


def _overlapping(anchors: Sequence[str], tokens: Sequence[str]) -> list[str]:
    """Return the tokens that can overlap an anchor, or a token that can, and so on.

    Strings that overlap share a character, so runs of blanks and newlines, which some vocabularies
    hold by the hundred and which would make the search stop at every line, drop out.
    """
    chars = {char for anchor in anchors for char in anchor}
    kept = list(anchors)
    rest = [token for token in tokens if token not in set(anchors)]
    while sharing := [token for token in rest if not chars.isdisjoint(token)]:
        kept += sharing
        rest = [token for token in rest if chars.isdisjoint(token)]
        chars.update(*sharing)
    return kept


# --- whether texts are cut: decided once, at load -------------------------------------------------


# To stand between added tokens: blanks and newlines at either end, words, digits, accents that
# normalizers compose, characters of several bytes, and text that looks like the beginning of an
# added token.
_TEST_TEXTS = (
    *("Hello world", "", " ", "\n\n", " a ", "x", "\n y", "don't 12345"),
    *("e\u0301a\u0308", "日本 語", "<|", "🙂\u200d  ", "_"),
)
_MAX_TOKENS_TRIED = 24


def choose_segmenter(
    backend: Tokenizer, obstacle: str | None
) -> tuple[Segmenter | None, str | None]:
    """Return a segmenter, or None and the reason why texts must be tokenised whole.

    Args:
        obstacle: From `obstacle_in`.
    """
    if obstacle is not None:
        return None, obstacle
    if backend.encode_special_tokens:
        return None, "splits_special_tokens"
    added = list(backend.get_added_tokens_decoder().values())
    try:
        segmenter = segmenter_for(added)
    except RecursionError:
        return None, "nested_added_tokens"
    if segmenter is None:
        return None, "no_anchor"
    if not survives_self_test(backend, segmenter, [token.content for token in added]):
        return None, "self_test"
    return segmenter, None


def survives_self_test(
    backend: Tokenizer, segmenter: Segmenter, added_tokens: Sequence[str]
) -> bool:
    """Return whether the pieces of a few dozen hard texts have the ids of the whole.

    Args:
        added_tokens: Texts of the tokenizer's added tokens, to mix in.
    """
    try:
        return all(
            _ids_of_pieces(backend, segmenter.split(text))
            == encode_all(backend, [text], add_special_tokens=False)[0]
            for text in _test_texts(sorted(segmenter.anchors), added_tokens)
        )
    except UntokenizableError:
        return False


def _ids_of_pieces(backend: Tokenizer, pieces: Sequence[str]) -> array[int]:
    ids = array("I")
    for piece in encode_all(backend, pieces, add_special_tokens=False):
        ids.extend(piece)
    return ids


def _test_texts(anchors: Sequence[str], added_tokens: Sequence[str]) -> Iterator[str]:
    """Mix texts and added tokens so that every text meets tokens on both sides, anchors above
    all."""
    few = list(islice(anchors, _MAX_TOKENS_TRIED))
    others = list(
        islice((token for token in added_tokens if token not in set(few)), _MAX_TOKENS_TRIED)
    )
    for shift in range(len(_TEST_TEXTS)):
        texts = [*_TEST_TEXTS[shift:], *_TEST_TEXTS[:shift]]
        yield "".join(
            text + token
            for text, token in zip(texts, cycle(few[shift % len(few) :] + few), strict=False)
        )
        yield "".join(
            token + text for text, token in zip(texts, cycle([*others, *few]), strict=False)
        )
        yield "".join(
            text + few[0] + other for text, other in zip(texts, cycle(others or few), strict=False)
        )
