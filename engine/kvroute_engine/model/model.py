"""The model: a decoder-only transformer that reads and writes paged keys, values and states.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama; the kinds of attention
differ in their masks only. A state layer is linear attention with a fixed decay per head
(retention: Sun et al., 2023): its past is one matrix per head.

A step's tokens are concatenated: `(tokens, ...)` below means all tokens of all chunks, chunk after
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvroute_engine.core.batch import SequenceChunk
from kvroute_engine.core.model_config import LayerKind, TransformerConfig
from kvroute_engine.model.kv_pages import KVPages


class Transformer(nn.Module):
    """The whole model. All tokens of a step are computed together, except in attention."""

    def __init__(self, config: TransformerConfig, pages: KVPages) -> None:
        """Draw the weights from the configuration's seed.

        Args:
            pages: Where its layers read and write the cache.
        """
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        group_and_index = {
            layer: (group_idx, layer_in_group)
            for group_idx, group in enumerate(config.layer_groups())
            for layer_in_group, layer in enumerate(group.layers)
        }
        self.layers = nn.ModuleList(
            Layer(config, kind, pages, *group_and_index[layer])
            for layer, kind in enumerate(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._seed_weights()

    def _seed_weights(self) -> None:
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                scale = 1.0 if name.startswith("embedding") else parameter.shape[-1] ** -0.5
                parameter.data = torch.randn(parameter.shape, generator=generator) * scale

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Compute a step.

        Returns:
            The logits of the token after each chunk, `(chunks, vocab_size)` float32.
        """
        device = self.embedding.weight.device
        tokens = torch.tensor(
            [token for chunk in chunks for token in chunk.token_ids], device=device
        )
        positions = torch.tensor(
            [position for chunk in chunks for position in range(chunk.start, chunk.stop)],
            device=device,
        )
        rotation = rotary(positions, self.config)
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, rotation, chunks)
        ends = torch.tensor([len(chunk.token_ids) for chunk in chunks], device=device).cumsum(0) - 1
        logits: Tensor = self.head(self.norm(hidden[ends]))
        return logits


class Layer(nn.Module):
    """Attention or a state, then SwiGLU, each with a norm in front and a residual around it."""

    def __init__(
        self,
        config: TransformerConfig,
        kind: LayerKind,
        pages: KVPages,
        group_idx: int,
        layer_in_group: int,
    ) -> None:
        """
        Args:
            kind: The part of the past that the layer sees.
            group_idx: KV cache group whose block tables it uses.
            layer_in_group: Its index there, and so the tensor of *pages* that it uses.
        """
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        if kind is LayerKind.STATE:
            self.mixer: nn.Module = StateMixer(config, pages.states(layer_in_group), group_idx)
        else:
            self.mixer = Attention(config, kind, pages.keys_and_values(layer_in_group), group_idx)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], chunks: Sequence[SequenceChunk]
    ) -> Tensor:
        """Compute the layer for a step.

        Args:
            hidden: `(tokens, hidden_size)`.
            rotation: From `rotary`, for the tokens' positions.
            chunks: The sequence of each run of tokens.

        Returns:
            `(tokens, hidden_size)`.
        """
        hidden = hidden + self.mixer(self.mixer_norm(hidden), rotation, chunks)
        inner = self.mlp_norm(hidden)
        down: Tensor = self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return hidden + down


class Attention(nn.Module):
    """Grouped-query attention over the pages that a chunk's block table names."""

    def __init__(
        self, config: TransformerConfig, kind: LayerKind, pages: Tensor, group_idx: int
    ) -> None:
        """
        Args:
            kind: Full, sliding window or chunked local.
            pages: `(num_blocks, 2, block_size, num_kv_heads, head_dim)` float32.
            group_idx: KV cache group whose block tables it uses.
        """
        super().__init__()
        self._config = config
        self._kind = kind
        self._pages = pages
        self._group_idx = group_idx
        self.query = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(
            config.hidden_size, config.num_kv_heads * config.head_dim, bias=False
        )
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], chunks: Sequence[SequenceChunk]
    ) -> Tensor:
        """Write the tokens' keys and values, then attend to them and to those in the pages.

        Args:
            hidden: `(tokens, hidden_size)`.
            rotation: From `rotary`, for the tokens' positions.
            chunks: The sequence of each run of tokens.

        Returns:
            `(tokens, hidden_size)`.
        """
        head_dim = self._config.head_dim
        queries = rotate(self.query(hidden).unflatten(-1, (-1, head_dim)), rotation)
        keys = rotate(self.key(hidden).unflatten(-1, (-1, head_dim)), rotation)
        values = self.value(hidden).unflatten(-1, (-1, head_dim))
        found, first = [], 0
        for chunk in chunks:
            part = slice(first, first + len(chunk.token_ids))
            self._write(chunk, keys[part], values[part])
            found.append(self._attend(chunk, queries[part]))
            first = part.stop
        out: Tensor = self.out(torch.cat(found).flatten(1))
        return out

    def _write(self, chunk: SequenceChunk, keys: Tensor, values: Tensor) -> None:
        """Both are `(chunk's tokens, num_kv_heads, head_dim)`."""
        size = self._config.block_size
        positions = torch.arange(chunk.start, chunk.stop, device=keys.device)
        first_block = chunk.start // size
        blocks = self._block_ids(chunk, first_block, keys.device)[positions // size - first_block]
        slots = positions % size
        self._pages[blocks, 0, slots] = keys
        self._pages[blocks, 1, slots] = values

    def _attend(self, chunk: SequenceChunk, queries: Tensor) -> Tensor:
        """*queries* and the result are `(chunk's tokens, num_heads, head_dim)`."""
        size = self._config.block_size
        first_block = self._first_visible(chunk.start) // size
        visible = self._pages[self._block_ids(chunk, first_block, queries.device)]
        # (2, visible tokens, num_kv_heads, head_dim), the chunk's own tokens included
        keys_and_values = visible.transpose(0, 1).flatten(1, 2)
        keys, values = keys_and_values[:, : chunk.stop - first_block * size]
        mask = self._mask(chunk, first_block * size, queries.device)
        attended = functional.scaled_dot_product_attention(
            queries.transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        )
        return attended.transpose(0, 1)

    def _block_ids(self, chunk: SequenceChunk, first: int, device: torch.device) -> Tensor:
        """Return the ids of the blocks from index *first* to the chunk's last."""
        stop = -(-chunk.stop // self._config.block_size)
        table = chunk.block_tables[self._group_idx]
        return torch.tensor([block.block_id for block in table[first:stop]], device=device)

    def _first_visible(self, position: int) -> int:
        """Return the position of the first token that the one at *position* attends to."""
        if self._kind is LayerKind.SLIDING_WINDOW:
            return max(0, position - self._config.sliding_window + 1)
        if self._kind is LayerKind.CHUNKED_LOCAL:
            return position // self._config.attention_chunk_size * self._config.attention_chunk_size
        return 0

    def _mask(self, chunk: SequenceChunk, first: int, device: torch.device) -> Tensor:
        """Return which tokens each token of the chunk attends to.

        Returns:
            `(chunk's tokens, tokens from position first on)` bool.
        """
        query = torch.arange(chunk.start, chunk.stop, device=device)[:, None]
        key = torch.arange(first, chunk.stop, device=device)[None, :]
        mask = key <= query
        if self._kind is LayerKind.SLIDING_WINDOW:
            mask &= query - key < self._config.sliding_window
        elif self._kind is LayerKind.CHUNKED_LOCAL:
            size = self._config.attention_chunk_size
            mask &= torch.div(query, size, rounding_mode="floor") == torch.div(
                key, size, rounding_mode="floor"
            )
        return mask


class StateMixer(nn.Module):
    """Linear attention: `S_t = decay * S_(t-1) + k_t v_t^T`, `o_t = q_t S_t`, a chunk at a time."""

    def __init__(self, config: TransformerConfig, pages: Tensor, group_idx: int) -> None:
        """
        Args:
            pages: `(num_blocks, num_kv_heads, head_dim, head_dim)` float32.
            group_idx: KV cache group whose block tables it uses.
        """
        super().__init__()
        self._config = config
        self._pages = pages
        self._group_idx = group_idx
        width = config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden_size, width, bias=False)
        self.key = nn.Linear(config.hidden_size, width, bias=False)
        self.value = nn.Linear(config.hidden_size, width, bias=False)
        self.output_norm = nn.RMSNorm(config.head_dim, eps=config.norm_epsilon)
        self.out = nn.Linear(width, config.hidden_size, bias=False)
        self._log_decay = torch.log(
            1 - 2.0 ** -(3 + torch.arange(config.num_kv_heads, dtype=torch.float32))
        )

    def forward(
        self, hidden: Tensor, _rotation: tuple[Tensor, Tensor], chunks: Sequence[SequenceChunk]
    ) -> Tensor:
        """Read the state before each chunk and write the one after it.

        Args:
            hidden: `(tokens, hidden_size)`.
            _rotation: Not used: a state knows distances by their decay.
            chunks: The sequence of each run of tokens.

        Returns:
            `(tokens, hidden_size)`.
        """
        parts = [
            layer(hidden).unflatten(-1, (-1, self._config.head_dim))
            for layer in (self.query, self.key, self.value)
        ]
        queries, keys, values = (part.transpose(0, 1) for part in parts)
        found, first = [], 0
        for chunk in chunks:
            part = slice(first, first + len(chunk.token_ids))
            scale = self._config.head_dim**-0.5
            found.append(self._mix(chunk, queries[:, part], keys[:, part] * scale, values[:, part]))
            first = part.stop
        mixed = self.output_norm(torch.cat(found, 1)).transpose(0, 1).flatten(1)
        out: Tensor = self.out(mixed)
        return out

    def _mix(self, chunk: SequenceChunk, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute one chunk at once instead of token by token.

        With `S` the state before the chunk, `d` the decay and `t`, `u` counted within the chunk:

            o_t = d^(t+1) q_t S + sum over u <= t of d^(t-u) (q_t k_u) v_u
            S'  = d^n S + sum over u of d^(n-1-u) k_u^T v_u

        Args:
            chunk: Its *n* tokens and where its states are.
            queries: `(num_kv_heads, n, head_dim)`.

        Returns:
            `(num_kv_heads, n, head_dim)`.
        """
        table, size = chunk.block_tables[self._group_idx], self._config.block_size
        count = len(chunk.token_ids)
        steps = torch.arange(count, device=queries.device)
        log_decay = self._log_decay.to(queries.device)[:, None, None]
        distance = steps[:, None] - steps[None, :]
        weights = torch.where(
            distance >= 0,
            torch.exp(log_decay * distance.clamp(min=0)),
            torch.zeros(()).to(queries.device),
        )
        within = (queries @ keys.transpose(1, 2) * weights) @ values
        state = (
            self._pages[table[(chunk.start - 1) // size].block_id]
            if chunk.start
            else torch.zeros_like(self._pages[0])
        )
        from_state = torch.exp(log_decay * (steps + 1)[None, :, None])
        mixed: Tensor = within + from_state * (queries @ state)
        to_end = torch.exp(log_decay * (count - 1 - steps)[None, :, None])
        self._pages[table[(chunk.stop - 1) // size].block_id] = (
            torch.exp(log_decay * count) * state + (to_end * keys).transpose(1, 2) @ values
        )
        return mixed


def rotary(positions: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Compute the angles of rotary positions (Su et al., 2021).

    Args:
        positions: `(tokens,)` int64.
        config: Base of the frequencies and size of a head.

    Returns:
        Cosines and sines, each `(tokens, 1, head_dim / 2)` float32.
    """
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (
        -torch.arange(half, device=positions.device, dtype=torch.float32) / half
    )
    angles = positions[:, None].to(torch.float32) * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the two halves of each head against each other.

    Args:
        heads: `(tokens, heads, head_dim)`.
        rotation: From `rotary`, for the tokens' positions.

    Returns:
        `(tokens, heads, head_dim)`.
    """
    cosine, sine = rotation
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
