"""A model's files, generated."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def write_byte_tokenizer(directory: Path) -> None:
    """Like the stub's: the ids of a text are its bytes, a chat is what its messages say."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def write_tokenizer(directory: Path) -> None:
    """Unlike the stub's, whose ids are bytes, so that the router finds that they disagree."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a tokenizer of the router alone"], trainer)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
