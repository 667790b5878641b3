"""Real tokenizers of the kinds that models have, trained here on a few sentences."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import ModelFiles, read_model_files

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't panic, it's only a test; we'll see what "
    "they've done!",
    "def main(argument: int) -> None:\n    print(f'hello {argument}')\n\n\n    return None\n",
    "Numbers like 1, 22, 333 and 4444 come with dates: 2024-01-31 and times 12:59.",
    "Zażółć gęślą jaźń. Съешь же ещё этих мягких французских булок. 日本語の文章です。 "
    "¿Dónde está el niño? naïve café",
    "user assistant system tool\n\n  indented   text\twith\ttabs \n and trailing blanks   ",
]
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _special(*contents: str, **options: bool) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False, **options) for content in contents]


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _llama3() -> Tokenizer:
    tokenizer = _byte_level_bpe()
    names = ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
    reserved = [f"<|reserved_special_token_{index}|>" for index in range(40)]
    tokenizer.add_special_tokens(_special(*(f"<|{name}|>" for name in names), *reserved))
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
            ),
        ]
    )
    return tokenizer


def _gpt2() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(_special("<|endoftext|>"))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def _qwen() -> Tokenizer:
    tokenizer = _byte_level_bpe()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(
        _special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>")
    )
    plain = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens(
        [AddedToken(content, special=False, normalized=False) for content in plain]
    )
    return tokenizer


def _sentencepiece_bpe(alphabet: str = string.printable) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=pieces,
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator([word for line in _CORPUS for word in line.split()], trainer)
    return tokenizer


def _with_llama2_tokens(tokenizer: Tokenizer) -> Tokenizer:
    # The trainer makes the byte pieces special; a model's file has them in its vocabulary only.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if not token["content"].startswith("<0x")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(_special("[INST]", "[/INST]"))
    single = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=single)
    return tokenizer


def _llama2() -> Tokenizer:
    return _with_llama2_tokens(_sentencepiece_bpe())


def _llama2_with_gaps() -> Tokenizer:
    """Without some letters: `<` is written as a byte."""
    return _with_llama2_tokens(_sentencepiece_bpe(""))


def _mistral() -> Tokenizer:
    tokenizer = _with_llama2_tokens(_sentencepiece_bpe())
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Nmt(),
            normalizers.NFKC(),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Strip(left=False),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(_special("<extra_id_0>", "<extra_id_1>"))
    ends = [("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=ends)
    return tokenizer


def _bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken("[mask2]", special=True, normalized=False, lstrip=True)]
    )
    tokenizer.add_tokens(
        [AddedToken("FoxTrot", normalized=True), AddedToken("[Ent]", normalized=True)]
    )
    ids = {name: tokenizer.token_to_id(name) for name in ("[SEP]", "[CLS]")}
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    return tokenizer


def _gemma() -> Tokenizer:
    tokenizer = _sentencepiece_bpe()
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if not token["content"].startswith("<0x")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    runs = [char * count for char in ("\n", "▁", "\t") for count in range(2, 9)]
    tokenizer.add_tokens(
        [AddedToken(run, normalized=False) for run in [*runs, "<table>", "</table>", "<h1>"]]
    )
    tokenizer.add_special_tokens(
        _special("<start_of_turn>", "<end_of_turn>", "<unused0>", "<unused01>")
    )
    return tokenizer


def _phi3() -> Tokenizer:
    """Anchors that strip on their right, as Phi-3 has them, and one that strips on its left."""
    tokenizer = _llama2()
    tokenizer.add_special_tokens(_special("<|user|>", "<|assistant|>", "<|end|>", rstrip=True))
    tokenizer.add_special_tokens(_special("<|left|>", lstrip=True))
    return tokenizer


def _awkward() -> Tokenizer:
    """Everything at once: tokens that overlap, strip, want words around them, and are matched after
    lowercasing."""
    tokenizer = _byte_level_bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.add_special_tokens(_special("<|a|>", "<|a|>b", "|><|", "<|", "word"))
    tokenizer.add_special_tokens(_special("<both>", lstrip=True, rstrip=True))
    tokenizer.add_special_tokens(_special("<single>", "solo", single_word=True))
    tokenizer.add_special_tokens([AddedToken("<Norm>", special=True, normalized=True)])
    tokenizer.add_tokens(
        [
            AddedToken("Plain", normalized=True, single_word=True),
            AddedToken("\n\n", normalized=False),
        ]
    )
    return tokenizer


_BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "llama3": _llama3,
    "gpt2": _gpt2,
    "qwen": _qwen,
    "llama2": _llama2,
    "llama2_with_gaps": _llama2_with_gaps,
    "mistral": _mistral,
    "unigram": _unigram,
    "bert": _bert,
    "gemma": _gemma,
    "phi3": _phi3,
    "awkward": _awkward,
}


@pytest.fixture(scope="session")
def build_tokenizer() -> Callable[[str], Tokenizer]:
    """Return a trained tokenizer by name, the same object every time."""
    built: dict[str, Tokenizer] = {}

    def build(name: str) -> Tokenizer:
        if name not in built:
            built[name] = _BUILDERS[name]()
        return built[name]

    return build


@pytest.fixture(params=sorted(_BUILDERS), scope="session")
def tokenizer(
    request: pytest.FixtureRequest, build_tokenizer: Callable[[str], Tokenizer]
) -> Tokenizer:
    """Every kind of tokenizer in turn."""
    return build_tokenizer(request.param)


@pytest.fixture(scope="session")
def local_of() -> Callable[..., LocalTokenizer]:
    """Wrap a library tokenizer, with options for ModelFiles as keywords."""

    def wrap(tokenizer: Tokenizer, *, use_native: bool = True, **files: Any) -> LocalTokenizer:
        return LocalTokenizer(
            ModelFiles(path="test", tokenizer_json=tokenizer.to_str().encode(), **files),
            use_native=use_native,
        )

    return wrap


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., ModelFiles]:
    """Write a model directory and read it back: the tokenizer, then other files by name."""

    def write(tokenizer: Tokenizer, **contents: object) -> ModelFiles:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in contents.items():
            path = tmp_path / name.replace("__", "/").replace("_jinja", ".jinja").replace(
                "_json", ".json"
            )
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_model_files(tmp_path)

    return write
