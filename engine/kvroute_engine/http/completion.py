"""One client request's response while it grows: the engine's outputs become pieces of text."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from kvroute_engine.core.requests import EngineRequest, FinishReason, StepOutput
from kvroute_engine.http.responses import Choice, CompletionUsage
from kvroute_engine.http.service import EngineService, Generation
from kvroute_engine.http.text_stream import TextStream


@dataclass(slots=True)
class _ChoiceInProgress:
    """One choice until its end."""

    index: int
    request: EngineRequest
    text: TextStream
    usage: CompletionUsage = field(default_factory=CompletionUsage)

    def take(self, output: StepOutput) -> Choice:
        """Return the next piece; the last one has a finish reason."""
        count = self.usage.completion_tokens + len(output.new_token_ids)
        self.usage = CompletionUsage.of(output.num_prompt_tokens, count, output.num_cached_tokens)
        ids, reason = output.new_token_ids, output.finish_reason
        # The token that ended it is counted but has no text, like a stop string.
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
    """Builds the response to one request of a client, with one choice per prompt."""

    def __init__(self, prompts: Sequence[tuple[EngineRequest, TextStream]]) -> None:
        """Take each prompt with the detokenizer of its output."""
        self._choices = {
            request.request_id: _ChoiceInProgress(index, request, text)
            for index, (request, text) in enumerate(prompts)
        }

    @property
    def usage(self) -> CompletionUsage:
        """Return the usage so far, over all choices."""
        return sum((choice.usage for choice in self._choices.values()), CompletionUsage())

    @property
    def num_choices(self) -> int:
        """Return the number of prompts."""
        return len(self._choices)

    async def start(self, service: EngineService) -> Generation:
        """Hand the prompts to the engine.

        Raises:
            EngineRequestError: The engine refuses one of them.
            EngineBusyError: No new requests are taken.
            EngineDeadError: The engine failed.
        """
        return await service.generate(*(choice.request for choice in self._choices.values()))

    async def pieces(self, generation: Generation) -> AsyncGenerator[Choice, None]:
        """Yield pieces of all choices as they come; closing the generator aborts the rest.

        Raises:
            EngineDeadError: The engine failed.
        """
        async with generation:
            async for output in generation:
                choice = self._choices[output.request_id]
                piece = choice.take(output)
                if choice.text.stopped_by is not None:
                    generation.end(output.request_id, FinishReason.STOP)
                yield piece

    async def full(self, generation: Generation) -> list[Choice]:
        """Wait for the end of every choice; they are in the order of the prompts.

        Raises:
            EngineDeadError: The engine failed.
        """
        pieces: list[list[Choice]] = [[] for _ in self._choices]
        async with contextlib.aclosing(self.pieces(generation)) as all_pieces:
            async for piece in all_pieces:
                pieces[piece.index].append(piece)
        return [
            Choice(
                index,
                "".join(piece.text for piece in own),
                own[-1].finish_reason,
                own[-1].stop_reason,
            )
            for index, own in enumerate(pieces)
        ]
