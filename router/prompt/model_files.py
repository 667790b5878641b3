"""A model directory -> its files for tokenisation.

Read are `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
`chat_template.jinja`, `additional_chat_templates/*.jinja`, `chat_template.json` and the
`model_type` in `config.json`, with the same precedence that transformers gives them. Only
`tokenizer.json` is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from router.prompt.errors import ModelFilesError, describe

# Model files are trusted, but a wrong path must not fill the memory.
_MAX_FILE_BYTES = 256 * 1024 * 1024

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class ModelFiles:
    """Holds the content of one model's files."""

    path: str
    """The directory, for messages."""
    tokenizer_json: bytes = field(repr=False)
    """Bytes of `tokenizer.json`."""
    chat_templates: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Template text by name; a model with one template calls it `default`."""
    processor_template: str | None = field(default=None, repr=False)
    """Template of a multimodal processor; it goes first where no tools are given."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text by name (`bos_token`), as templates see them."""
    extra_special_tokens: tuple[str, ...] = ()
    """Special tokens that have no name."""
    added_tokens: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """Added tokens that `tokenizer_config.json` lists, by id; transformers adds the missing
    ones."""
    splits_special_tokens: bool = False
    """Special tokens in a text are tokenised as plain text."""
    model_type: str | None = None
    """From `config.json`; None without one."""
    has_mistral_tokenizer: bool = False
    """Mistral's own tokenizer is in the directory too, and engines prefer it."""


def read_model_files(directory: Path) -> ModelFiles:
    """Read a model directory.

    Raises:
        ModelFilesError: The directory or its `tokenizer.json` is missing, or a file is not a valid
            JSON object.
    """
    if not directory.is_dir():
        raise ModelFilesError(
            str(directory), "no such directory", "must be one on this machine, with tokenizer.json"
        )
    tokenizer_json = _read(directory / "tokenizer.json")
    if tokenizer_json is None:
        raise ModelFilesError(
            str(directory / "tokenizer.json"), "missing", "must be there to tokenise in the router"
        )
    config = _read_object(directory / "tokenizer_config.json")
    return ModelFiles(
        path=str(directory),
        tokenizer_json=tokenizer_json,
        chat_templates=_chat_templates(directory, config),
        processor_template=_processor_template(directory),
        special_tokens=_special_tokens(config, _read_object(directory / "special_tokens_map.json")),
        extra_special_tokens=_extra_special_tokens(config),
        added_tokens=_added_tokens(directory, config),
        splits_special_tokens=config.get("split_special_tokens") is True,
        model_type=_text_or_none(_read_object(directory / "config.json").get("model_type")),
        has_mistral_tokenizer=_has_mistral_tokenizer(directory),
    )


def _read(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelFilesError(
                str(path), "too large", f"must have at most {_MAX_FILE_BYTES} bytes"
            )
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFilesError(str(path), type(error).__name__, "must be a readable file") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one if the file is missing."""
    data = _read(path)
    if data is None:
        return {}
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelFilesError(str(path), str(error), "must be valid JSON") from error
    if not isinstance(value, dict):
        raise ModelFilesError(str(path), describe(value), "must be an object")
    return value


def _read_text(path: Path) -> str | None:
    data = _read(path)
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError as error:
        raise ModelFilesError(str(path), "not UTF-8", "must be UTF-8 text") from error


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name: files of their own override those inside
    `tokenizer_config.json`."""
    templates: dict[str, str] = {}
    default = _read_text(directory / "chat_template.jinja")
    if default is not None:
        templates["default"] = default
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        text = _read_text(path)
        if text is not None:
            templates[path.stem] = text
    return templates or _configured_templates(config.get("chat_template"))


def _configured_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {name: text for name, text in value.items() if isinstance(text, str)}
    entries = value if isinstance(value, list) else []
    named = [
        (entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)
    ]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def _processor_template(directory: Path) -> str | None:
    return _text_or_none(_read_object(directory / "chat_template.json").get("chat_template"))


def _special_tokens(config: Mapping[str, Any], tokens_map: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _token_text(config.get(name, tokens_map.get(name))) for name in _TOKEN_NAMES}
    # A model may name tokens of its own (image_token); templates see those too.
    for name in config:
        if name.endswith("_token") and name not in named:
            named[name] = _token_text(config[name])
    return {name: text for name, text in named.items() if text is not None}


def _extra_special_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    listed: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name)
        listed += (
            list(value.values())
            if isinstance(value, dict)
            else value
            if isinstance(value, list)
            else []
        )
    return tuple(text for token in listed if (text := _token_text(token)) is not None)


def _token_text(value: object) -> str | None:
    """Return the text of a token that is written as a string or as an object with its options."""
    return _text_or_none(value.get("content") if isinstance(value, dict) else value)


def _added_tokens(directory: Path, config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    tokens = config.get("added_tokens_decoder")
    if tokens is None:
        return {}
    rule = "added_tokens_decoder must map token ids to objects with a content"
    path = str(directory / "tokenizer_config.json")
    if not isinstance(tokens, dict):
        raise ModelFilesError(path, describe(tokens), rule)
    for token_id, token in tokens.items():
        if (
            not token_id.isdigit()
            or not isinstance(token, dict)
            or not isinstance(token.get("content"), str)
        ):
            raise ModelFilesError(path, describe(token), rule)
    return {int(token_id): token for token_id, token in tokens.items()}


def _has_mistral_tokenizer(directory: Path) -> bool:
    """Look for the names that vLLM looks for: older models have `tokenizer.model.v3`."""
    names = ("tekken.json", "tokenizer.model.v*")
    return any(True for name in names for _ in directory.glob(name))


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
