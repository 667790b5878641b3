"""A model directory is read as transformers reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from router.prompt.errors import ModelFilesError
from router.prompt.local.tokenizer import LocalTokenizer
from router.prompt.model_files import ModelFiles, read_model_files
from router.prompt.prompts import TextPrompt

_Write = Callable[..., ModelFiles]


@pytest.fixture
def tokenizer_file(build_tokenizer: Callable[[str], Tokenizer]) -> Tokenizer:
    return build_tokenizer("qwen")


def _ids(files: ModelFiles, text: str, **options: bool) -> list[int]:
    local = LocalTokenizer(files)
    return local.finish(local.prepare(TextPrompt(text, **options), None)).tolist()


def test_the_tokenizer_alone_is_enough(write_model: _Write, tokenizer_file: Tokenizer) -> None:
    """Base models have nothing else."""
    files = write_model(tokenizer_file)
    assert (files.chat_templates, files.special_tokens, files.model_type) == ({}, {}, None)
    assert _ids(files, "the fox") == tokenizer_file.encode("the fox").ids


def test_a_template_file_goes_before_the_configuration(
    write_model: _Write, tokenizer_file: Tokenizer
) -> None:
    """Newer models have both, and the file is the one that is kept up."""
    config = {"chat_template": "old"}
    assert write_model(tokenizer_file, tokenizer_config_json=config).chat_templates == {
        "default": "old"
    }
    files = write_model(tokenizer_file, tokenizer_config_json=config, chat_template_jinja="new")
    assert files.chat_templates == {"default": "new"}


def test_named_templates_are_a_list_or_files(
    write_model: _Write, tokenizer_file: Tokenizer
) -> None:
    """Both forms are in use."""
    listed = [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b"},
        {"name": 7},
    ]
    files = write_model(tokenizer_file, tokenizer_config_json={"chat_template": listed})
    assert files.chat_templates == {"default": "a", "tool_use": "b"}
    files = write_model(
        tokenizer_file, chat_template_jinja="c", additional_chat_templates__tool_use_jinja="d"
    )
    assert files.chat_templates == {"default": "c", "tool_use": "d"}


def test_a_processor_s_template_is_kept_apart(
    write_model: _Write, tokenizer_file: Tokenizer
) -> None:
    """It is used only where a request has no tools."""
    files = write_model(
        tokenizer_file,
        chat_template_json={"chat_template": "p"},
        tokenizer_config_json={"chat_template": "t"},
    )
    assert (files.processor_template, files.chat_templates) == ("p", {"default": "t"})


def test_special_tokens_are_strings_or_objects(
    write_model: _Write, tokenizer_file: Tokenizer
) -> None:
    """The configuration goes before the map; names of a model's own count too."""
    files = write_model(
        tokenizer_file,
        tokenizer_config_json={
            "bos_token": None,
            "eos_token": {"content": "<|im_end|>"},
            "image_token": "<|image|>",
        },
        special_tokens_map_json={"bos_token": "<x>", "pad_token": "<|endoftext|>"},
    )
    assert files.special_tokens == {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "image_token": "<|image|>",
    }


def test_tokens_that_only_the_configuration_knows_are_added(
    write_model: _Write, tokenizer_file: Tokenizer
) -> None:
    """transformers adds them, so an engine sees them as one token each."""
    size = tokenizer_file.get_vocab_size()
    tokens = {
        str(size): {"content": "<new>", "special": True},
        str(size + 1): {"content": "New", "normalized": True},
    }
    config = {
        "added_tokens_decoder": tokens,
        "additional_special_tokens": ["<more>", "<new>"],
        "bos_token": "<bos>",
    }
    files = write_model(tokenizer_file, tokenizer_config_json=config)
    assert _ids(files, "<new>New<bos><more>") == [size, size + 1, size + 2, size + 3]


@pytest.mark.parametrize("flag", [True, False])
def test_ends_are_those_of_the_tokenizer_file(
    write_model: _Write, build_tokenizer: Callable[[str], Tokenizer], flag: bool
) -> None:
    """transformers ignores these flags beside a tokenizer.json; one BOS too many, and no prefix
    ever matches."""
    tokenizer = build_tokenizer("llama2")
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": flag, "add_eos_token": flag}
    assert (
        _ids(write_model(tokenizer, tokenizer_config_json=config), "fox")
        == tokenizer.encode("fox").ids
    )


def test_truncation_and_padding_of_the_file_are_ignored(
    write_model: _Write, tokenizer_file: Tokenizer
) -> None:
    """They are left over from training; an engine sets its own."""
    tokenizer = Tokenizer.from_str(tokenizer_file.to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    text = "the quick brown fox"
    assert _ids(write_model(tokenizer), text) == tokenizer_file.encode(text).ids


@pytest.mark.parametrize(
    ("name", "is_noticed"),
    [("tekken_json", True), ("tokenizer.model.v3", True), ("tokenizer.model", False)],
)
def test_mistral_s_own_tokenizer_is_noticed(
    write_model: _Write, tokenizer_file: Tokenizer, name: str, is_noticed: bool
) -> None:
    """Engines prefer it, under both of its names, and it renders chats by itself."""
    others = {name: "{}", "config_json": {"model_type": "mistral"}}
    files = write_model(tokenizer_file, **others)
    assert (files.has_mistral_tokenizer, files.model_type) == (is_noticed, "mistral")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", json.dumps({"added_tokens_decoder": [1]})),
        ("tokenizer_config.json", json.dumps({"added_tokens_decoder": {"x": {"content": "a"}}})),
        ("tokenizer_config.json", json.dumps({"added_tokens_decoder": {"1": {}}})),
        ("special_tokens_map.json", "{"),
        ("config.json", "7"),
        ("chat_template.json", "{"),
    ],
)
def test_a_broken_file_is_named(
    write_model: _Write, tokenizer_file: Tokenizer, tmp_path: Path, name: str, content: str
) -> None:
    """The operator reads which file it is and what is wrong with it."""
    write_model(tokenizer_file)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelFilesError, match=name):
        read_model_files(tmp_path)


def test_text_that_is_no_text_is_named(
    write_model: _Write, tokenizer_file: Tokenizer, tmp_path: Path
) -> None:
    """The same for a template file."""
    write_model(tokenizer_file)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFilesError, match=r"chat_template\.jinja"):
        read_model_files(tmp_path)


def test_a_directory_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    """The commonest mistake of all; a model's name on a hub is no directory."""
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: missing"):
        read_model_files(tmp_path)
    with pytest.raises(ModelFilesError, match="google/gemma: no such directory"):
        read_model_files(tmp_path / "google/gemma")
