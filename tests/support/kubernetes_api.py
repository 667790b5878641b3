"""A Kubernetes API server that speaks lists and watches, with their faults: 410 Gone, cut and
refused watches, bookmarks, pages, 500s.

It keeps the last changes by resource version, as etcd does, so that a watch can resume from any
that is not compacted.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

PODS = "/api/v1/namespaces/{}/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"

_ATTACH_FILTER = 26
"""SO_ATTACH_FILTER of Linux."""


def pod(
    name: str,
    address: str = "10.0.0.1",
    *,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    port: int | None = 8000,
    **metadata: Any,
) -> dict[str, Any]:
    """A pod as the API shows it, with fields that nobody reads among the others."""
    ports = [] if port is None else [{"name": "http", "containerPort": port, "protocol": "TCP"}]
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": {"app": "vllm", **(labels or {})},
            "annotations": annotations,
            **metadata,
        },
        "spec": {"containers": [{"name": "engine", "image": "x", "ports": ports}]},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
        },
    }


class ApiServer:
    """Serves collections of objects by path."""

    def __init__(self, token: str | None = None) -> None:
        self.version = 100
        self.oldest = 100
        """Changes before it are compacted away."""
        self.requests: list[str] = []
        """The targets of all requests, in their order."""
        self.fail_with: int | None = None
        """A status for every request instead of its answer."""
        self.watches = 0
        self._token = token
        self._objects: dict[str, dict[str, dict[str, Any]]] = {}
        self._changes: list[tuple[int, str, str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._cut = 0
        self._watching: set[asyncio.StreamWriter] = set()
        self._vanished: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def put(self, path: str, thing: dict[str, Any]) -> None:
        """Create or replace an object."""
        known = self._objects.setdefault(path, {})
        name = thing["metadata"]["name"]
        await self._change(path, "MODIFIED" if name in known else "ADDED", thing)

    async def delete(self, path: str, name: str) -> None:
        await self._change(path, "DELETED", self._objects[path][name])

    async def bookmark(self, path: str) -> None:
        """Move every watch on without a change."""
        thing = {"kind": "Pod", "metadata": {"name": ""}}
        await self._change(path, "BOOKMARK", thing)

    async def compact(self) -> None:
        """Forget all changes: who resumes from an older version is told 410."""
        self.version += 1
        self.oldest = self.version
        self._changes.clear()

    async def cut_watches(self) -> None:
        """Cut the connection of every watch, in the middle of a chunk."""
        async with self._changed:
            self._cut += 1
            self._changed.notify_all()

    def vanish(self) -> None:
        """Send nothing more on the watches' connections, and have them take no packet, not even one
        that asks whether they are there, as behind a cut cable."""
        # A filter of one instruction, BPF_RET of 0: no byte of a packet passes.
        nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(nothing))
        self._vanished |= self._watching
        for writer in self._vanished:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)

    async def _change(self, path: str, kind: str, thing: dict[str, Any]) -> None:
        self.version += 1
        shown = {
            **thing,
            "metadata": {**thing["metadata"], "resourceVersion": str(self.version)},
        }
        known = self._objects.setdefault(path, {})
        if kind == "DELETED":
            known.pop(thing["metadata"]["name"], None)
        elif kind != "BOOKMARK":
            known[thing["metadata"]["name"]] = shown
        async with self._changed:
            self._changes.append((self.version, path, kind, shown))
            self._changed.notify_all()

    # --- serving ----------------------------------------------------------------------------------

    async def start(self, tls: ssl.SSLContext | None = None) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut_watches()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                await self._answer(line.split()[1].decode(), headers, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _answer(
        self, target: str, headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> None:
        self.requests.append(target)
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if self._token is not None and headers.get("authorization") != f"Bearer {self._token}":
            await _whole(writer, 401, {"kind": "Status", "code": 401, "message": "Unauthorized"})
        elif self.fail_with is not None:
            await _whole(writer, self.fail_with, {"kind": "Status", "message": "etcd is away"})
        elif "watch" in query:
            await self._watch(url.path, query, writer)
        else:
            await _whole(writer, 200, self._page(url.path, query))

    def _page(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        found = [
            thing for _, thing in sorted(self._objects.get(path, {}).items()) if _fits(thing, query)
        ]
        start, limit = int(query.get("continue", "0")), int(query["limit"])
        more = {"continue": str(start + limit)} if start + limit < len(found) else {}
        return {
            "kind": "List",
            "metadata": {"resourceVersion": str(self.version), **more},
            "items": found[start : start + limit],
        }

    async def _watch(self, path: str, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        seen, cut = int(query["resourceVersion"]), self._cut
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self.watches += 1
        self._watching.add(writer)
        try:
            if seen < self.oldest:
                gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
                _chunk(writer, {"type": "ERROR", "object": gone})
                writer.write(b"0\r\n\r\n")
                return
            while True:
                for version, where, kind, thing in list(self._changes):
                    is_new = version > seen and writer not in self._vanished
                    if is_new and where == path and _fits(thing, query, kind):
                        _chunk(writer, {"type": kind, "object": thing})
                    seen = max(seen, version)
                await writer.drain()
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: self._cut != cut or self.version > seen  # noqa: B023
                    )
                if self._cut != cut:
                    writer.write(b"ffff\r\n{")
                    raise ConnectionResetError
        finally:
            self.watches -= 1
            self._watching.discard(writer)


def _fits(thing: dict[str, Any], query: dict[str, str], kind: str = "") -> bool:
    if kind == "BOOKMARK":
        return True
    labels = thing["metadata"].get("labels") or {}
    wanted = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
    field, _, name = query.get("fieldSelector", "").partition("=")
    return wanted.items() <= labels.items() and (
        field != "metadata.name" or thing["metadata"]["name"] == name
    )


async def _whole(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))
    await writer.drain()


def _chunk(writer: asyncio.StreamWriter, change: dict[str, Any]) -> None:
    data = json.dumps(change).encode() + b"\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@asynccontextmanager
async def api_server(token: str | None = None) -> AsyncIterator[tuple[ApiServer, str]]:
    """A server, and its URL."""
    server = ApiServer(token)
    port = await server.start()
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        await server.stop()
