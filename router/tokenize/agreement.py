"""Do the router and a replica tokenise alike? Asked once per replica, before its hits are believed.

A router whose tokenizer differs from the engine's, by one token at the front, predicts hits that
never come. The usual causes: another version of the model's files, a chat template given on the
engine's command line, a BOS token that only one of them adds, a version of transformers that
rebuilds Llama's tokenizer instead of reading it.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.tokenize.errors import UntokenizableError
from router.tokenize.local.tokenizer import LocalTokenizer
from router.tokenize.prompts import ChatPrompt, TextPrompt
from router.tokenize.remote import RemoteTokenizer

_TEXT = "The answer is 42.\n\n  Isn't it?\tна́йден 日本語 🙂"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}
_USER = {"role": "user", "content": _TEXT}
_TURNS = [
    {"role": "system", "content": "Be brief."},
    _USER,
    {"role": "assistant", "content": "Yes."},
    _USER,
]

_PROBES: dict[str, TextPrompt | ChatPrompt] = {
    "text": TextPrompt(_TEXT),
    # Where SentencePiece models differ by the age of the library that converted them.
    "text after a blank": TextPrompt("  " + _TEXT),
    "text without special tokens": TextPrompt(_TEXT, add_special_tokens=False),
    "one message": ChatPrompt([_USER]),
    "several turns": ChatPrompt(_TURNS),
    "tools": ChatPrompt([_USER], tools=[_TOOL]),
}


@dataclass(frozen=True)
class Disagreement:
    """One probe that came out differently."""

    probe: str
    """Its name."""
    first_difference: int
    """Index of the first id that differs, or the length of the shorter list."""
    local_count: int
    """Ids in the router."""
    remote_count: int
    """Ids at the replica."""


async def find_disagreements(
    local: LocalTokenizer, remote: RemoteTokenizer, model: str | None
) -> list[Disagreement]:
    """Tokenise the probes at both and return where they differ; probes that one of them cannot do
    are left out.

    Raises:
        ReplicaAnswerError: The replica refused, or its answer makes no sense.
        OSError: No replica answered; TimeoutError alike.
    """
    found: list[Disagreement] = []
    for name, prompt in _PROBES.items():
        try:
            here = local.finish(local.prepare(prompt, None))
            there = await remote.tokenize(prompt, model=model, cache_salt=None)
        except UntokenizableError:
            continue
        if here != there:
            same = next(
                (index for index, (a, b) in enumerate(zip(here, there, strict=False)) if a != b),
                None,
            )
            first = min(len(here), len(there)) if same is None else same
            found.append(Disagreement(name, first, len(here), len(there)))
    return found
