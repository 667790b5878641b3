"""What pages show of requests: those of this process, and of all other workers if there are any.

Each worker keeps its own. The one that is asked asks the others, over their supervisor, and puts
together what they say in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from router.http.responses import (
    ApiParts,
    history_view,
    minute_view,
    overview,
    requests_view,
    with_headline,
)
from router.http.views import HistoryView, Overview, ReplicaSummary, RequestsView
from router.observability.history import RawHours, summed_hours
from router.observability.labels import natural_order
from router.observability.problems import ReplicaProblem
from router.observability.request_log import Totals

_AnswerT = TypeVar("_AnswerT")

WHAT = "insight"
"""What workers ask each other for."""


class _RequestsAsked(msgspec.Struct, frozen=True, tag="requests"):
    after: int
    limit: int


class _GlanceAsked(msgspec.Struct, frozen=True, tag="glance"):
    """At the rest of the page."""


class _HoursAsked(msgspec.Struct, frozen=True, tag="hours"):
    replicas: list[str]


class _Load(msgspec.Struct, frozen=True, array_like=True):
    """What one worker has at a replica, and what is wrong with that."""

    requests: int
    prefill_tokens: int
    problems: list[ReplicaProblem]


class _Glance(msgspec.Struct, frozen=True):
    """Of an overview, what differs from worker to worker."""

    under_way: int
    hint_tokens: int
    totals: Totals
    seconds: float
    shortages: list[str]
    loads: dict[str, _Load]


_questions = msgspec.msgpack.Decoder(_RequestsAsked | _GlanceAsked | _HoursAsked)


class Insight:
    """Answers what operators ask.

    Args:
        parts: Of this process.
    """

    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts
        self._member = parts.fleet_changes.member
        if self._member is not None:
            self._member.answers[WHAT] = self._answer

    async def requests(self, after: int, limit: int) -> RequestsView:
        """The requests that changed last.

        Args:
            after: Only those that changed after this change.
            limit: At most this many.
        """
        others = await self._ask(_RequestsAsked(after, limit), RequestsView)
        own = requests_view(self._parts.request_log, after, limit)
        views = [own, *others]
        requests = sorted(
            (request for view in views for request in view.requests),
            key=lambda request: request.change,
            reverse=True,
        )
        # What changes after the first has answered is asked for again.
        return RequestsView(
            started_at=own.started_at,
            change=min(view.change for view in views),
            requests=requests[:limit],
        )

    async def overview(self) -> Overview:
        """The router at a glance."""
        others = await self._ask(_GlanceAsked(), _Glance)
        view = self._own_overview()
        if not others:
            return view
        glances = [self._glance(view), *others]
        replicas = [_merged(replica, glances) for replica in view.replicas]
        replicas.sort(key=lambda replica: (replica.level.severity, natural_order(replica.id)))
        totals = Totals()
        for glance in glances:
            totals.add(glance.totals)
        return with_headline(
            msgspec.structs.replace(
                view,
                under_way=sum(glance.under_way for glance in glances),
                hint_tokens=sum(glance.hint_tokens for glance in glances),
                minute=minute_view(totals, max(glance.seconds for glance in glances)),
                shortages=list(dict.fromkeys(text for each in glances for text in each.shortages)),
                replicas=replicas,
            )
        )

    async def history(self, replica_ids: Sequence[str]) -> HistoryView:
        """The last hour of the router, and of some replicas; those that are not followed are left
        out."""
        others = await self._ask(_HoursAsked(list(replica_ids)), RawHours)
        own = self._parts.history.raw(replica_ids)
        return history_view(summed_hours([own, *others], self._parts.history.bounds))

    # --- among workers ----------------------------------------------------------------------------

    async def _ask(self, question: msgspec.Struct, kind: type[_AnswerT]) -> list[_AnswerT]:
        if self._member is None:
            return []
        bodies = await self._member.ask(WHAT, msgspec.msgpack.encode(question))
        decode = msgspec.msgpack.Decoder(kind).decode
        return await asyncio.to_thread(lambda: [decode(body) for body in bodies.values() if body])

    async def _answer(self, body: bytes) -> bytes:
        question = _questions.decode(body)
        if isinstance(question, _RequestsAsked):
            view = requests_view(self._parts.request_log, question.after, question.limit)
            return msgspec.msgpack.encode(view)
        if isinstance(question, _HoursAsked):
            return msgspec.msgpack.encode(self._parts.history.raw(question.replicas))
        return msgspec.msgpack.encode(self._glance(self._own_overview()))

    def _own_overview(self) -> Overview:
        parts = self._parts
        return overview(
            parts.fleet(),
            parts.request_log,
            parts.config.policy.name,
            parts.admission.under_way,
            parts.shortages.present(),
            parts.models.tokenizers(),
            sum(model.steering.statistics().hit_tokens for model in parts.models),
        )

    def _glance(self, view: Overview) -> _Glance:
        log = self._parts.request_log
        return _Glance(
            view.under_way,
            view.hint_tokens,
            log.totals.total(),
            log.totals.seconds,
            view.shortages,
            {
                each.id: _Load(each.requests, each.prefill_tokens, each.problems)
                for each in view.replicas
            },
        )


def _merged(replica: ReplicaSummary, glances: Sequence[_Glance]) -> ReplicaSummary:
    """A replica with the load of all workers, and the problems that the worst informed has."""
    loads = [glance.loads[replica.id] for glance in glances if replica.id in glance.loads]
    problems = min(
        (load.problems for load in loads if load.problems),
        key=lambda found: (found[0].level.severity, -len(found)),
        default=[],
    )
    return msgspec.structs.replace(
        replica,
        requests=sum(load.requests for load in loads),
        prefill_tokens=sum(load.prefill_tokens for load in loads),
        problems=problems,
        level=problems[0].level if problems else replica.level,
    )
