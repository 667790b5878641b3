"""How often a router and its board exchange what they know."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping

import pytest
from typing_extensions import override

from router.sharing.board import (
    MOST_PAUSE_S,
    MOST_SHARE,
    SPACING_S,
    Board,
    BoardExchange,
    BoardStatistics,
)
from router.sharing.slots import Slot, encode_slot


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class OneOther(Board):
    """One other process, which says something new whenever it is asked."""

    kind = "none"

    def __init__(self) -> None:
        self.said = self.asked = 0

    @override
    def publish(self, slot: bytes) -> None:
        self.said += 1

    @override
    def read(self) -> Mapping[str, bytes]:
        self.asked += 1
        return {"1": encode_slot(Slot(begun={"r0": self.asked}))}

    @override
    def note_broken(self) -> None:
        raise AssertionError

    @override
    def statistics(self) -> BoardStatistics:
        return BoardStatistics(True, 1, 0.0, self.said, 0)

    @override
    async def run(self, on_news: Callable[[], None]) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("cpu_s", "waited_s", "pause_s"),
    [
        (0.0, 0.0, SPACING_S),
        (0.001, 0.0, 0.02),
        (0.01, 0.0, 0.2),
        (5.0, 0.0, MOST_PAUSE_S),
        (0.0, 60.0, SPACING_S),
    ],
    ids=["nothing", "little", "much", "too much", "it waited for the processor"],
)
def test_what_costs_much_is_heard_less_often_but_often_enough(
    cpu_s: float, waited_s: float, pause_s: float
) -> None:
    """A router must not spend its time on hearing others, nor be without them for long."""
    clock, cpu, board = Clock(), Clock(), OneOther()

    def take(_slots: Mapping[str, Slot]) -> None:
        cpu.now += cpu_s
        clock.now += cpu_s + waited_s

    exchange = BoardExchange(board, Slot, take, clock, cpu)
    exchange.catch_up()
    clock.now += pause_s * 0.99
    exchange.catch_up()
    assert board.asked == 1
    clock.now += pause_s * 0.02
    exchange.catch_up()
    assert board.asked == 2


async def test_news_all_the_time_are_told_and_heard_no_more_often_than_allowed() -> None:
    """The turn that comes by itself and the one for news share one allowance."""
    cpu, board, said_at, heard_at = Clock(), OneOther(), [], []
    loop = asyncio.get_running_loop()

    def collect() -> Slot:
        cpu.now += 0.002
        said_at.append(loop.time())
        return Slot(begun={"r0": len(said_at)})

    def take(_slots: Mapping[str, Slot]) -> None:
        cpu.now += 0.002
        heard_at.append(loop.time())

    exchange = BoardExchange(board, collect, take, loop.time, cpu)
    running = asyncio.create_task(exchange.run())
    while len(said_at) < 8 or len(heard_at) < 8:
        exchange.soon()
        exchange.catch_up()
        await asyncio.sleep(0)
    running.cancel()
    for times in (said_at, heard_at):
        pauses = [late - early for early, late in itertools.pairwise(times)]
        assert min(pauses) > 0.002 / MOST_SHARE * 0.99
