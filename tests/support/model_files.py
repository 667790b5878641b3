"""A model's files, generated."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def write_tokenizer(directory: Path) -> None:
    """Unlike the stub's, whose ids are bytes, so that the router finds that they disagree."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a tokenizer of the router alone"], trainer)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
