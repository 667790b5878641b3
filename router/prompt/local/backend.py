"""Has the tokenizers library tokenise texts, and finds the special tokens around a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer

from router.prompt.errors import UntokenizableError
from router.prompt.token_ids import Ends, TokenIds


def encode_all(
    backend: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[TokenIds]:
    """Tokenise texts, each on its own.

    Always the batch call: `Tokenizer.encode` holds the interpreter lock while it runs. The fast
    form skips the offsets, which take a third of the time and are not needed here.

    Args:
        add_special_tokens: Let the post-processor add BOS, EOS and the like to each.
    Raises:
        UntokenizableError: A text is not valid Unicode, or the library crashed, as it does with
            some sets of added tokens that strip blanks.
    """
    try:
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeEncodeError):
        # Half of a surrogate pair: JSON text inside a message, as the arguments of a call, can
        # spell one.
        raise UntokenizableError("not_unicode") from None
    except BaseException as error:
        # A panic in the library's Rust code derives from BaseException and cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise UntokenizableError("tokenizer_crashed") from None
    return [array("I", encoding.ids) for encoding in encodings]


# --- the special tokens around a prompt ---------------------------------------------------------

# Post-processors are many (templates, BERT, RoBERTa, sequences of them). For one text each of them
# puts fixed ids before it and fixed ids after it; the few that do not are left to the library.
_SAMPLES = ("a", "", "The quick brown fox", "a b", "1 2 3 \n\n x")


def find_ends(backend: Tokenizer) -> Ends | None:
    """Compare samples with and without special tokens; None where fixed ends do not explain the
    difference."""
    try:
        bare_samples = encode_all(backend, _SAMPLES, add_special_tokens=False)
        whole_samples = encode_all(backend, _SAMPLES, add_special_tokens=True)
    except UntokenizableError:
        return None
    pairs = list(zip(bare_samples, whole_samples, strict=True))
    bare, whole = pairs[0]
    for before in range(len(whole) - len(bare) + 1):
        ends = Ends(whole[:before], whole[before + len(bare) :])
        if all(ends.around(ids) == expected for ids, expected in pairs):
            return ends
    return None
