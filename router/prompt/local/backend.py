"""`ModelFiles` -> a ready `tokenizers.Tokenizer`, set up as transformers sets it up for the
engine.

`add_bos_token` and `add_eos_token` of `tokenizer_config.json` are ignored on purpose:
transformers 5 ignores them if there is a `tokenizer.json`, and uses the post-processor in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer

from router.prompt.errors import ModelFilesError, UntokenizableError
from router.prompt.model_files import ModelFiles
from router.prompt.prompts import Ends, TokenIds


def build_backend(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer, with the other files' options.

    Raises:
        ModelFilesError: The tokenizers library cannot read `tokenizer.json`.
    """
    try:
        backend = Tokenizer.from_buffer(files.tokenizer_json)
    except ValueError as error:
        rule = "must be a tokenizer that the installed tokenizers library reads"
        raise ModelFilesError(f"{files.path}/tokenizer.json", str(error), rule) from error
    # Truncation and padding stored in the file are defaults of the training run; the engine sets
    # its own.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = files.splits_special_tokens
    _add_missing_tokens(backend, files)
    return backend


def _add_missing_tokens(backend: Tokenizer, files: ModelFiles) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, token in sorted(files.added_tokens.items()):
        if token["content"] not in known:
            options = {
                name: token.get(name) is True
                for name in ("lstrip", "rstrip", "single_word", "special")
            }
            normalized = token.get("normalized", not options["special"]) is True
            backend.add_tokens([AddedToken(token["content"], normalized=normalized, **options)])
            known.add(token["content"])
    named = dict.fromkeys([*files.special_tokens.values(), *files.extra_special_tokens])
    missing = [text for text in named if text not in known]
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def encode(backend: Tokenizer, text: str, *, add_special_tokens: bool) -> TokenIds:
    """Tokenise one text; the interpreter lock is free meanwhile.

    Args:
        add_special_tokens: Let the post-processor add BOS, EOS and the like.
    Raises:
        UntokenizableError: See `encode_all`.
    """
    return encode_all(backend, [text], add_special_tokens=add_special_tokens)[0]


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
