"""fastokens, which tokenises thirty times as fast as the tokenizers library, for the tokenizers
that it is known to get right.

It takes many other files too, and answers other ids: for regular expressions that it hands to
PCRE2, for models without a byte alphabet, where the ids of added tokens have gaps. Wrong ids would
cost every hit and show nowhere. So it is used only where

- every component has one of the forms listed here; for each of them hundreds of thousands of hard
  texts had the same ids, and for some every code point in several contexts;
- it is built from what the tokenizers library makes of the file, which settles the ids of added
tokens; the post-processor is left out, as the ends of a prompt are known;
- some thousand texts, made of the tokenizer's own tokens and of text that tokenizers have rules
  about, have the same ids at load. That takes a tenth of the time that loading takes.

Models with the same tokenizer share it: it takes a second or two to load, and 120 MB.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from tokenizers import Tokenizer

from router.prompt.errors import UntokenizableError
from router.prompt.local.backend import encode_all
from router.prompt.token_ids import TokenIds

# Otherwise it starts threads of its own, which spin between texts: a long one takes twice the CPU
# time. It reads this when it tokenises its first text.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
try:
    import fastokens
except ImportError:  # there is no wheel for this platform
    fastokens = None

# --- the forms that it gets right -----------------------------------------------------------------

_Component = dict[str, Any]


def _sequence(*pre_tokenizers: _Component) -> _Component:
    return {"type": "Sequence", "pretokenizers": list(pre_tokenizers)}


def _split(regex: str) -> _Component:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _byte_level(*, use_regex: bool) -> _Component:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


_SPACE = "\u2581"  # SentencePiece writes a blank so
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_REGEXES = {
    "Llama 3, cl100k": (
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
    ),
    "Qwen 2 and 3": (
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS
    ),
    "Qwen 3.5": (
        _ENDINGS
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
        + _BLANKS
    ),
    "Llama 4, o200k": (
        f"{_UPPER}*{_LOWER}+{_ENDINGS}?|{_UPPER}+{_LOWER}*{_ENDINGS}?"
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
        + _BLANKS
    ),
    "Tekken": (
        f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS
    ),
}
# With real line breaks in it, as in the model's file.
_DEEPSEEK_REGEX = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    + "\r\n"
    + r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["""
    + "\r\n"
    + r"""]*|\s*["""
    + "\r\n"
    + r"""]+|\s+(?!\S)|\s+"""
)
_BYTE_PRE_TOKENIZERS = (
    *(_sequence(_split(regex), _byte_level(use_regex=False)) for regex in _WORD_REGEXES.values()),
    _sequence(
        _split(r"\p{N}{1,3}"),
        _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        _split(_DEEPSEEK_REGEX),
        _byte_level(use_regex=False),
    ),
    _byte_level(use_regex=True),  # GPT-2
)
_BYTE_NORMALIZERS = (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
_SENTENCEPIECE_FORMS = (
    # Llama 2; Gemma
    ({"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]}, None),
    (
        _REPLACE,
        {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
    ),
)


class _ListedModel(msgspec.Struct):
    """The part of `model` that matters; vocabulary and merges are skipped unread."""

    type: str = ""
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    byte_fallback: bool = False


class _ListedFile(msgspec.Struct):
    model: _ListedModel
    normalizer: _Component | None = None
    pre_tokenizer: _Component | None = None


def reason_against(tokenizer_json: str) -> str | None:
    """Return which part of a tokenizer has no form that is listed here; None where all have."""
    file = msgspec.json.decode(tokenizer_json, type=_ListedFile)
    model = file.model
    if (
        model.type != "BPE"
        or model.dropout
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
    ):
        return "model"
    pre_tokenizer = _without_offsets(file.pre_tokenizer)
    if model.byte_fallback:
        is_listed = (file.normalizer, pre_tokenizer) in _SENTENCEPIECE_FORMS
        return None if is_listed else "pre_tokenizer"
    if file.normalizer not in _BYTE_NORMALIZERS:
        return "normalizer"
    return None if pre_tokenizer in _BYTE_PRE_TOKENIZERS else "pre_tokenizer"


def _without_offsets(component: Any) -> Any:
    """Return the component without options that change offsets only."""
    if isinstance(component, Mapping):
        return {
            name: _without_offsets(value)
            for name, value in component.items()
            if name != "trim_offsets"
        }
    return list(map(_without_offsets, component)) if isinstance(component, list) else component


# --- tokenising -----------------------------------------------------------------------------------


class NativeTokenizer:
    """A tokenizer of fastokens, safe to use from several threads.

    Args:
        tokenizer: A `fastokens.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._encode = tokenizer.encode_batch_flat

    def encode(self, text: str) -> TokenIds:
        """Tokenise a text, without special tokens around it; the interpreter lock is free
        meanwhile. The first text in each thread takes 50 ms more.

        Raises:
            UntokenizableError: The text is not valid Unicode, or the library failed.
        """
        try:
            return array("I", self._encode([text])[0])
        except UnicodeEncodeError:
            raise UntokenizableError("not_unicode") from None
        except (ValueError, RuntimeError):
            raise UntokenizableError("tokenizer_crashed") from None
        except BaseException as error:
            # A panic in the library's Rust code derives from BaseException.
            if type(error).__name__ != "PanicException":
                raise
            raise UntokenizableError("tokenizer_crashed") from None


_shared: WeakValueDictionary[bytes, NativeTokenizer] = WeakValueDictionary()
_loading = threading.Lock()


def load_native(backend: Tokenizer) -> NativeTokenizer | str:
    """Load a tokenizer and test it; or return in a word why the tokenizers library must do.

    Args:
        backend: From `build_backend`; it stays as it is.
    """
    if fastokens is None:
        return "not_installed"
    if backend.encode_special_tokens:
        return "splits_special_tokens"
    tokenizer_json = _without_post_processor(backend)
    reason = reason_against(tokenizer_json)
    if reason is not None:
        return reason
    key = hashlib.sha256(tokenizer_json.encode()).digest()
    with _loading:
        native = _shared.get(key)
        if native is None:
            try:
                native = NativeTokenizer(fastokens.Tokenizer.from_json_str(tokenizer_json))
            except (ValueError, RuntimeError):
                return "refused"
            if not survives_self_test(native, backend):
                return "self_test"
            _shared[key] = native
    return native


def _without_post_processor(backend: Tokenizer) -> str:
    post_processor = backend.post_processor
    backend.post_processor = None
    try:
        return backend.to_str()
    finally:
        backend.post_processor = post_processor


# --- the self-test --------------------------------------------------------------------------------

TEST_TEXTS = 4000
_TEXTS_AT_ONCE = 500
_MAX_FRAGMENTS = 24
_FRAGMENTS = (
    *(" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\x0b", "\x0c", "\x85"),
    *("\u00a0", "\u3000", "\u200b", "\u180e", "\u2028", "\ufeff", "\x00", "\u00ad", "\x1f"),
    *("the", " quick", "Brown", "FOX", " iPhone", "snake_case", "don't", "I'LL", "'S"),
    *("'", "\u2019s"),
    *("1", "22", "333", "4444", "3.14", "1,000,000", "\u0663", "\u00bd", "\u2167", "x2", "0x1F"),
    *(".", ",", "...", "!?", "://", "/", "//\n", "#", "->", "=>", "__", "==", "{", "}", '"', "\\n"),
    *("<", "|>", "<|", "</", "<0x0A>", "\u2581", "\u2581\u2581", "\u0120", "$A"),
    *("e\u0301", "\u00e9", "\u0130", "\u00df", "\u01c5", "\u1e9e", "\ufb01"),
    *("\u212b", "\u1100\u1161"),
    *("\u65e5\u672c\u8a9e", "\u4e2d\u6587", "\u304b\u306a", "\u30ab", "\uac00"),
    *("\u0928\u093f", "\u0e01\u0e33"),
    *("\u0440\u0443\u0441", "\u0627\u0644", "\u05e9\u05dc", "\u03a3\u03c2"),
    *("\U0001f642", "\U0001f469\u200d\U0001f4bb"),
    *("\U0001f1e9\U0001f1ea", "\ud7a3", "\ue000", "\ufffd", "\U0010ffff", "\u0378"),
    *("\u20dd", "\ufe0f"),
)


def survives_self_test(native: NativeTokenizer, backend: Tokenizer) -> bool:
    """Return whether both give the same ids for `TEST_TEXTS` texts, the same ones each time."""
    texts = _test_texts(backend)
    try:
        while batch := list(islice(texts, _TEXTS_AT_ONCE)):
            expected = encode_all(backend, batch, add_special_tokens=False)
            if [native.encode(text) for text in batch] != expected:
                return False
    except UntokenizableError:
        return False
    return True


def _test_texts(backend: Tokenizer) -> Iterator[str]:
    """Mix text that tokenizers have rules about with added tokens, other tokens, and any
    characters."""
    draw = random.Random(0)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    size = backend.get_vocab_size()
    for _ in range(TEST_TEXTS):
        pieces: list[str] = []
        for _ in range(draw.randint(1, _MAX_FRAGMENTS)):
            kind = draw.random()
            if kind < 0.6:
                pieces.append(draw.choice(_FRAGMENTS))
            elif kind < 0.75 and added:
                pieces.append(draw.choice(added))
            elif kind < 0.9:
                pieces.append(backend.decode([draw.randrange(size)], skip_special_tokens=False))
            elif kind < 0.95:
                pieces.append(draw.choice(_FRAGMENTS) * draw.randint(2, 40))
            else:
                pieces.append(_any_character(draw))
        yield "".join(pieces)


def _any_character(draw: random.Random) -> str:
    code = draw.randrange(0x32400)
    return "" if 0xD800 <= code < 0xE000 else chr(code)
