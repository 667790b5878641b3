"""Draws the table of `kvevents/stream_repair.py`.

`python -m docs.stream_diagram` prints what belongs into ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvevents.stream_repair import TABLE
from kvevents.stream_state import Input, SourceState, State

_NOT_DRAWN = frozenset({Input.DISCONNECTED, Input.CLOSED})
_ANY = "any"
_FEWEST_SOURCES, _MOST_EXCEPTIONS = 3, 2
_COLOURS = {
    SourceState.CONNECTING: "#eeeeee",
    SourceState.RECOVERING: "#d6e4ff",
    SourceState.LIVE: "#d9f2d9",
    SourceState.SUSPECT: "#ffe2c6",
}


def diagram() -> str:
    """Return the table as Mermaid text.

    Left out: inputs that change no state, lost connections and the end. An input that leads to the
    same state from nearly everywhere is drawn once, from `any`; its exceptions are drawn as well.
    """
    usual = dict(_usual_targets())
    edges: dict[tuple[str, State], list[str]] = {}
    for given, target in usual.items():
        edges.setdefault((_ANY, target), []).append(given.value)
    for state, row in TABLE.items():
        for given, (target, _) in row.items():
            is_plain = target is state and given not in usual
            if not is_plain and usual.get(given) is not target and given not in _NOT_DRAWN:
                edges.setdefault((state.value, target), []).append(given.value)
    return "\n".join(
        [
            "stateDiagram-v2",
            f"    [*] --> {State.CONNECTING.value}",
            *(
                f"    {source} --> {target.value}: {', '.join(inputs)}"
                for (source, target), inputs in edges.items()
            ),
            *_classes(),
        ]
    )


def _usual_targets() -> Iterator[tuple[Input, State]]:
    """Yield inputs that lead to one state from at least three others, with at most two
    exceptions."""
    for given in Input:
        targets = [
            (state, row[given].state)
            for state, row in TABLE.items()
            if given in row and given not in _NOT_DRAWN
        ]
        for target in {target for _, target in targets}:
            sources = [state for state, led in targets if led is target and state is not target]
            exceptions = [state for state, led in targets if led is not target]
            if len(sources) >= _FEWEST_SOURCES and len(exceptions) <= _MOST_EXCEPTIONS:
                yield given, target


def _classes() -> Iterator[str]:
    """Yield colours by what users see."""
    for shown, colour in _COLOURS.items():
        states = ",".join(state.value for state in State if state.shown is shown)
        yield f"    classDef shown_{shown.value} fill:{colour}"
        yield f"    class {states} shown_{shown.value}"


if __name__ == "__main__":
    print(diagram())
