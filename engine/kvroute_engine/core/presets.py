"""Models by name: the layer patterns of models that people serve, in three sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvroute_engine.core.model_config import LayerKind, TransformerConfig
from offload.errors import CacheConfigError

_F, _W, _C, _S = LayerKind.FULL, LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_LOCAL, LayerKind.STATE

_PATTERNS: dict[str, tuple[LayerKind, ...]] = {
    "full": (_F, _F),
    "gemma": (_W, _W, _W, _W, _W, _F),
    "gptoss": (_W, _F),
    "llama4": (_C, _C, _C, _F),
    "mamba-hybrid": (_S, _S, _S, _F),
}
"""Llama and Qwen; Gemma 3; gpt-oss; Llama 4; Qwen3-Next and Bamba."""


@dataclass(frozen=True, slots=True)
class _Size:
    repeats: int
    """The number of times that the pattern occurs."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


_SIZES = {
    "tiny": _Size(
        repeats=1, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, block_size=16
    ),
    "small": _Size(
        repeats=2, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=32, block_size=16
    ),
    "base": _Size(
        repeats=4, hidden_size=768, num_heads=12, num_kv_heads=4, head_dim=64, block_size=32
    ),
}


def preset_names() -> list[str]:
    """Return every name that `preset` knows; a name without a size means tiny."""
    return [*_PATTERNS, *(f"{pattern}-{size}" for pattern in _PATTERNS for size in _SIZES)]


def preset(name: str, **changes: object) -> TransformerConfig:
    """Look up a model.

    Args:
        name: A pattern, with or without a size, such as `gemma` or `gptoss-small`.
        **changes: Fields of the configuration to replace.

    Raises:
        CacheConfigError: *name* is unknown.
    """
    pattern, _, size_name = name.rpartition("-")
    if name in _PATTERNS:
        pattern, size_name = name, "tiny"
    if pattern not in _PATTERNS or size_name not in _SIZES:
        raise CacheConfigError(
            f"preset {name[:40]!r} must be one of {', '.join(_PATTERNS)}, "
            f"optionally followed by -{' or -'.join(_SIZES)}"
        )
    size = _SIZES[size_name]
    config = TransformerConfig(
        name=name,
        layers=_PATTERNS[pattern] * size.repeats,
        hidden_size=size.hidden_size,
        intermediate_size=2 * size.hidden_size,
        num_heads=size.num_heads,
        num_kv_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        block_size=size.block_size,
    )
    return replace(config, **changes)  # type: ignore[arg-type]
