"""One request's answer while it grows: steps of the engine become text, choice by choice, until
each has ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from offload.engine.core.requests import EngineRequest, FinishReason, StepOutput
from offload.engine.http.responses import Choice, TokenUsage
from offload.engine.http.service import EngineService, Generation
from offload.engine.http.text_stream import TextStream


@dataclass(slots=True)
class _ChoiceInProgress:
    """One choice under way."""

    index: int
    request: EngineRequest
    text: TextStream
    usage: TokenUsage = field(default_factory=TokenUsage)

    def take(self, output: StepOutput) -> Choice:
        """The next piece; the last one has a finish reason."""
        count = self.usage.completion_tokens + len(output.new_token_ids)
        self.usage = TokenUsage(output.num_prompt_tokens, count, output.num_cached_tokens)
        ids, reason = output.new_token_ids, output.finish_reason
        # The token that ended it is counted and not written, as a stop string is.
        text = self.text.feed(ids[:-1] if reason is FinishReason.STOP else ids)
        if reason is not None:
            text += self.text.finish()
        if self.text.stopped_by is not None:
            return Choice(self.index, text, FinishReason.STOP.value, self.text.stopped_by)
        return Choice(self.index, text, reason.value if reason else None, self._stop_token(output))

    def _stop_token(self, output: StepOutput) -> int | None:
        if output.finish_reason is not FinishReason.STOP or not output.new_token_ids:
            return None
        last = output.new_token_ids[-1]
        return last if last in self.request.sampling.stop_token_ids else None


class CompletionBuilder:
    """The answer to one request of a client: a choice for each of its prompts."""

    def __init__(self, choices: Sequence[tuple[EngineRequest, TextStream]]) -> None:
        self._growing = {
            request.request_id: _ChoiceInProgress(index, request, text)
            for index, (request, text) in enumerate(choices)
        }

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far, over all choices."""
        return sum((growing.usage for growing in self._growing.values()), TokenUsage())

    @property
    def num_choices(self) -> int:
        """As many as prompts."""
        return len(self._growing)

    async def start(self, service: EngineService) -> Generation:
        """Hand the prompts to the engine; raises what `EngineService.generate` raises."""
        return await service.generate(*(growing.request for growing in self._growing.values()))

    async def pieces(self, generation: Generation) -> AsyncGenerator[Choice, None]:
        """Every choice's pieces as they come; raises `EngineDeadError`. Whoever stops in between
        aborts what is left."""
        async with generation:
            async for output in generation:
                growing = self._growing[output.request_id]
                piece = growing.take(output)
                if growing.text.stopped_by is not None:
                    generation.end(output.request_id, FinishReason.STOP)
                yield piece

    async def whole(self, generation: Generation) -> list[Choice]:
        """Every choice at its end, in the order of the prompts; raises `EngineDeadError`."""
        pieces: list[list[Choice]] = [[] for _ in self._growing]
        async with contextlib.aclosing(self.pieces(generation)) as all_pieces:
            async for piece in all_pieces:
                pieces[piece.index].append(piece)
        return [
            Choice(
                index,
                "".join(piece.text for piece in of_one),
                of_one[-1].finish_reason,
                of_one[-1].stop_reason,
            )
            for index, of_one in enumerate(pieces)
        ]
