"""The special tokens that a tokenizer puts before and after a prompt, found by looking at what it
does.

Post-processors are many (templates, BERT, RoBERTa, sequences of them); for one text each of them
puts fixed ids before it and fixed ids after it, or is not used from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from router.tokenize.backend import encode_all
from router.tokenize.errors import UntokenizableError
from router.tokenize.prompts import TokenIds

__all__ = ["Ends", "find_ends"]

_SAMPLES = ("a", "", "The quick brown fox", "a b", "1 2 3 \n\n x")


@dataclass(frozen=True)
class Ends:
    """Ids before and after every prompt that gets special tokens."""

    before: TokenIds
    after: TokenIds

    def around(self, ids: TokenIds) -> TokenIds:
        """Return *ids* with the ends added."""
        return self.before + ids + self.after if self.before or self.after else ids


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
