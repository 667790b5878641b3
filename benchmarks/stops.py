"""Through how many files of the router's Python does one request go?

    python -m benchmarks.stops [--path]

A whole router in this process, whose calls are traced, with a stub replica. One request of each
kind is sent, after one like it: its way until it is sent on or answered (`serving`), and what is
noted of it then (`recording`). `stays`: how often a file is entered, from another one or by a
return to it; `stops`: the files among these; `returns`: what is left; `rooms`: the packages right
below `router/`. What threads do for it counts as well; what the core does is not Python. `--path`
prints the files in their order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import uvloop

import router
from benchmarks.figures import report
from benchmarks.load import stub_replica
from benchmarks.stalls import until_healthy
from benchmarks.text_path import write_model
from router.config.schema import RouterConfig
from router.serve.server import serve
from tests.support.http_client import ask
from tests.support.vllm_publisher import free_port

_ROUTER = str(Path(router.__file__).parent)
_ENTRY = "plane/data_plane.py", "_handle"
"""The questions and reports of the core to Python go through this function."""
_RECORDS = frozenset({"running", "settled", "summed", "looked_up", "ended"})
"""The events by which the core reports."""
_REPORTED_S = 0.3
"""Within which what was noted of a request has been reported."""
_MODEL = {"model": "bench", "max_tokens": 4}
_CHAT = _MODEL | {"messages": [{"role": "user", "content": "How far is it to the sea?"}]}
REQUESTS: Mapping[str, tuple[str, dict[str, object]]] = {
    "token ids": ("/v1/completions", _MODEL | {"prompt": list(range(100))}),
    "text": ("/v1/completions", _MODEL | {"prompt": "How far is it to the sea?"}),
    "chat": ("/v1/chat/completions", _CHAT),
    "stream of a chat": ("/v1/chat/completions", _CHAT | {"stream": True}),
    "where to send token ids": ("/route", _MODEL | {"prompt": list(range(100))}),
    "where to send a chat": ("/route", _CHAT),
}


class Walk:
    """Notes the files that are entered on behalf of requests, in the order of time."""

    def __init__(self) -> None:
        self.serving: list[str] = []
        self.recording: list[str] = []
        self._event = contextvars.ContextVar("event", default="")
        """The question or report of the core; empty: none."""

    def clear(self) -> None:
        """Begin anew."""
        self.serving.clear()
        self.recording.clear()

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Trace this thread, and those that begin meanwhile."""
        threading.setprofile(self._on_call)
        sys.setprofile(self._on_call)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # CPython's own default

    def _on_call(self, frame: FrameType, event: str, _what: object) -> None:
        if event not in ("call", "return"):
            return
        file = _file_of(frame)
        if file is None:
            return
        if (file, frame.f_code.co_name) == _ENTRY:
            # Tasks that begin meanwhile go on with it.
            self._event.set(frame.f_locals["kind"] if event == "call" else "")
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._event.get():
            return
        way = self.recording if self._event.get() in _RECORDS else self.serving
        entered = file if event == "call" else _caller(frame)
        if entered is not None and (not way or way[-1] != entered):
            way.append(entered)


def _file_of(frame: FrameType) -> str | None:
    """Return a file of the router by its path there; None for others."""
    path = frame.f_code.co_filename
    return path[len(_ROUTER) + 1 :] if path.startswith(_ROUTER) else None


def _caller(frame: FrameType) -> str | None:
    above = frame.f_back
    while above is not None:
        file = _file_of(above)
        if file is not None:
            return file
        above = above.f_back
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", action="store_true", help="print the files in their order")
    options = parser.parse_args()
    walk = Walk()
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory, walk.traced():
        uvloop.run(_measure(walk, Path(directory), options.path))


async def _measure(walk: Walk, directory: Path, shows_path: bool) -> None:
    model = {"name": "bench", "tokenizer": str(write_model(directory, "tokenizers"))}
    url, port = f"http://127.0.0.1:{await stub_replica()}", free_port()
    config = {
        "server": {"port": port, "host_names": ["router"]},
        "replicas": [{"url": url, "models": ["bench"], "kv_events": []}],
        "models": [model],
    }
    served = asyncio.create_task(serve(RouterConfig.model_validate(config)))
    await until_healthy(port)
    for name, (path, body) in REQUESTS.items():
        for _ in range(2):
            walk.clear()
            await _ask(port, path, body)
            await asyncio.sleep(_REPORTED_S)
        for part, files in (("serving", walk.serving), ("recording", walk.recording)):
            _report(name, part, list(files), shows_path)
    signal.raise_signal(signal.SIGTERM)
    await served


async def _ask(port: int, path: str, body: Mapping[str, object]) -> None:
    headers = {"content-type": "application/json"}
    answer = await ask(port, "POST", path, json.dumps(body).encode(), headers)
    assert answer.status == 200, answer


def _report(request: str, part: str, files: list[str], shows_path: bool) -> None:
    stops = list(dict.fromkeys(files))
    report(
        "stops",
        request=request,
        part=part,
        stays=len(files),
        stops=len(stops),
        returns=len(files) - len(stops),
        rooms=len({Path(file).parts[0] for file in stops}),
    )
    if shows_path:
        print("    " + " > ".join(files))


if __name__ == "__main__":
    main()
