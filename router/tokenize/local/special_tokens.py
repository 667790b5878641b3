"""The special tokens that a tokenizer puts before and after a prompt, found by looking at what it
does.

Post-processors are many (templates, BERT, RoBERTa, sequences of them); for one text each of them
puts fixed ids before it and fixed ids after it, or is not used from here.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from router.tokenize.errors import UntokenizableError
from router.tokenize.local.backend import encode_all
from router.tokenize.truncation import Ends

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
