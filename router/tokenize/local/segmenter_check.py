"""Deciding, once at load, whether a tokenizer's texts are cut: by its rules, then by trying."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from tokenizers import Tokenizer

from router.tokenize.errors import UntokenizableError
from router.tokenize.local.backend import encode, encode_all
from router.tokenize.local.segments import Segmenter, TokenizerRules, segmenter_for

# To stand between added tokens: blanks and newlines at either end, words, digits, accents that
# normalizers compose, characters of several bytes, and text that looks like the beginning of an
# added token.
_TEXTS = (
    *("Hello world", "", " ", "\n\n", " a ", "x", "\n y", "don't 12345"),
    *("e\u0301a\u0308", "日本 語", "<|", "🙂\u200d  ", "_"),
)
_MAX_TOKENS_TRIED = 24


def choose_segmenter(
    backend: Tokenizer, rules: TokenizerRules
) -> tuple[Segmenter | None, str | None]:
    """Return a segmenter, or None and the reason why texts must be tokenised whole.

    Args:
        backend: From `build_backend`.
        rules: What `tokenizer.json` says about cutting.
    """
    if rules.obstacle is not None:
        return None, rules.obstacle
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
    """Whether the pieces of a few dozen hard texts have the ids of the whole.

    Args:
        backend: From `build_backend`.
        segmenter: Cuts the texts.
        added_tokens: Texts of the tokenizer's added tokens, to mix in.
    """
    try:
        return all(
            _ids_of_pieces(backend, segmenter.split(text))
            == encode(backend, text, add_special_tokens=False)
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
    for shift in range(len(_TEXTS)):
        texts = [*_TEXTS[shift:], *_TEXTS[:shift]]
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
