"""Collections of Kubernetes objects, kept true by a list and watches.

Plain HTTP to the API server with the service account's token, as the API's documentation describes
lists and watches (kubernetes.io, "Kubernetes API Concepts"): a list gives a resource version, a
watch continues from it, bookmarks move it on, and 410 means that it is too old, so that all is
listed again.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

import msgspec
from aiohappyeyeballs import AddrInfoType

from kvevents.errors import UNREADABLE
from kvevents.pacing import Backoff
from router.config.origin import Header, Origin, Timeouts
from router.errors import RouterError
from router.fleet.client import UpstreamClient, UpstreamResponse
from router.fleet.client_errors import FirstByteTimeout, IdleTimeout, UpstreamError

PAGE_OBJECTS = 500
MAX_PAGE_BYTES = 64 * 1024 * 1024
MAX_LINE_BYTES = 4 * 1024 * 1024
"""The longest event of a watch. An object has at most 1.5 MiB in etcd."""
MAX_OBJECTS = 16_384
WATCH_S = 240
"""How long the server keeps a watch open; then it is asked for again."""
LOST_S = 30
"""A watch whose server is gone without a word is noticed after so long, as client-go's pings do
after 45 s. The kernel asks: an API server has nothing to do for it."""
_PROBES = 3
_ANSWER_S = 10.0
_SHORT_S = 1.0
"""A watch that ends sooner is not asked for again at once."""
_GONE = 410


class KubernetesError(RouterError):
    """The API server cannot be asked, or its answer cannot be used."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


# --- asking ---------------------------------------------------------------------------------------


class Metadata(msgspec.Struct, rename="camel", frozen=True):
    """The metadata of an object."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


T = TypeVar("T")


class _Page(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: tuple[msgspec.Raw, ...] | None = None


class _ListMetadata(msgspec.Struct, rename="camel", frozen=True):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Change(msgspec.Struct, frozen=True):
    """One event of a watch."""

    type: str
    object: msgspec.Raw


class _Named(msgspec.Struct, frozen=True):
    metadata: Metadata


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class KubernetesApi:
    """An API server, as one account sees it."""

    def __init__(
        self,
        origin: Origin,
        token: Callable[[], str | None],
        trusted: Callable[[], ssl.SSLContext | None],
    ) -> None:
        """Ask nothing yet; make it inside a running event loop.

        Args:
            token: Returns the account's token; called for every request, since it is renewed.
            trusted: Returns the trusted certificates, None: the system's; called for every request,
                since a cluster may change its authority.
        """
        self._origin = origin
        self._token = token
        self._client = UpstreamClient(trusted, make_socket=_probing_socket)

    async def close(self) -> None:
        await self._client.close()

    async def list_all(self, path: str, selector: Mapping[str, str]) -> tuple[list[bytes], str]:
        """All objects of a collection, each as JSON, and the version of the list.

        Args:
            selector: `labelSelector` or `fieldSelector`.
        Raises:
            KubernetesError: The server refuses, or its answer cannot be read.
            UpstreamError: No answer.
        """
        found: list[bytes] = []
        page = _ListMetadata()
        while True:
            query = {**selector, "limit": str(PAGE_OBJECTS)}
            if page.continue_:
                query["continue"] = page.continue_
            answer = _decode(await self._get(path, query), _Page)
            found += map(bytes, answer.items or ())
            page = answer.metadata
            if not page.continue_:
                return found, page.resource_version
            if len(found) > MAX_OBJECTS:
                raise KubernetesError(f"{path}: more than {MAX_OBJECTS} objects")

    async def watch(
        self, path: str, selector: Mapping[str, str], version: str
    ) -> AsyncIterator[list[Change]]:
        """Yield what changes from *version* on, as it arrives, until the server ends the watch.

        Args:
            version: The list's, or the last change's.
        Raises:
            KubernetesError: See `list_all`; its status is 410 where *version* is too old.
            UpstreamError: The connection broke.
        """
        query = {
            **selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        patience = WATCH_S + 2 * _ANSWER_S
        target = _target(path, query)
        timeouts = Timeouts(_ANSWER_S, patience, patience)
        response = await self._client.send(
            self._origin, b"GET", target, self._headers(), b"", timeouts
        )
        try:
            if response.status != 200:
                raise KubernetesError(f"{path}: status {response.status}", response.status)
            async for lines in _lines(response):
                yield [_decode(line, Change) for line in lines]
        finally:
            response.abort()

    async def _get(self, path: str, query: Mapping[str, str]) -> bytes:
        target, times = _target(path, query), Timeouts(_ANSWER_S, _ANSWER_S, _ANSWER_S)
        status, body = await self._client.fetch(
            self._origin, target, times, MAX_PAGE_BYTES, self._headers()
        )
        if status != 200:
            raise KubernetesError(f"{path}: status {status}{_message(body)}", status)
        return body

    def _headers(self) -> list[Header]:
        token = self._token()
        bearer = [] if token is None else [(b"authorization", b"Bearer " + token.encode("ascii"))]
        return [(b"accept", b"application/json"), *bearer]


def _probing_socket(address: AddrInfoType) -> socket.socket:
    """Make a socket whose connection breaks when the other end has vanished."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    interval_s = max(1, LOST_S // (2 * _PROBES))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", LOST_S - _PROBES * interval_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", LOST_S * 1000),  # of a request that is not acknowledged
    ):
        if hasattr(socket, name):  # not every system has them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _target(path: str, query: Mapping[str, str]) -> bytes:
    return f"{path}?{urlencode(query)}".encode("ascii")


def _message(body: bytes) -> str:
    try:
        return f": {_decode(body, _Status).message[:200]}"
    except KubernetesError:
        return ""


def _decode(data: bytes | msgspec.Raw, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise KubernetesError(f"an answer that cannot be read: {error}"[:300]) from None


async def _lines(response: UpstreamResponse) -> AsyncIterator[list[bytes]]:
    """Yield the lines of a body, as many at a time as arrive together."""
    rest = b""
    while (chunk := await response.read_chunk()) is not None:
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise KubernetesError(f"a change of more than {MAX_LINE_BYTES} bytes")
        if whole := [line for line in whole if line]:
            yield whole


# --- following a collection -----------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Collection(Generic[T]):
    """The objects of a collection, kept true by a list and watches."""

    _api: KubernetesApi
    _path: str
    _selector: Mapping[str, str]
    _kind: type[T]
    _retry: Backoff

    def __post_init__(self) -> None:
        self._version = ""
        self.objects: dict[str, T] = {}
        """The objects, by name."""
        self.unreadable: dict[str, str] = {}
        """The reasons why objects cannot be read, by name."""

    async def follow(self, changed: Callable[[], None], on_failure: Callable[[str], None]) -> None:
        """Keep the objects true until cancelled.

        Args:
            on_failure: Called with the reason when the server cannot be asked; the objects stay.
        """
        while True:
            await asyncio.sleep(await self._attempt(changed, on_failure))

    async def _attempt(
        self, changed: Callable[[], None], on_failure: Callable[[str], None]
    ) -> float:
        """List and watch once; return how long to wait before the next time, in seconds."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await self._follow_once(changed)
        except (KubernetesError, UpstreamError, OSError) as error:
            if isinstance(error, KubernetesError):
                self._version = ""  # a new list settles any error
            if getattr(error, "status", None) != _GONE:
                on_failure(f"{type(error).__name__}: {error}"[:300])
            return self._retry.next_delay()
        return 0.0 if loop.time() - started > _SHORT_S else self._retry.next_delay()

    async def _follow_once(self, changed: Callable[[], None]) -> None:
        """List if need be, and watch until the server ends the watch."""
        if not self._version:
            objects, self._version = await self._api.list_all(self._path, self._selector)
            self.objects, self.unreadable = {}, {}
            for each in objects:
                self._take(each)
            changed()
        try:
            async for changes in self._api.watch(self._path, self._selector, self._version):
                for change in changes:
                    self._apply(change)
                self._retry.reset()
                changed()
        except (FirstByteTimeout, IdleTimeout):
            pass  # nothing has changed for as long as a watch lasts

    def _apply(self, change: Change) -> None:
        if change.type == "ERROR":
            status = _decode(change.object, _Status)
            raise KubernetesError(f"{self._path}: {status.message[:200]}", status.code)
        metadata = _decode(change.object, _Named).metadata
        if change.type in ("ADDED", "MODIFIED"):
            self._take(change.object)
        elif change.type == "DELETED":
            self.objects.pop(metadata.name, None)
            self.unreadable.pop(metadata.name, None)
        self._version = metadata.resource_version or self._version

    def _take(self, data: bytes | msgspec.Raw) -> None:
        name = _decode(data, _Named).metadata.name
        if len(self.objects) >= MAX_OBJECTS:
            raise KubernetesError(f"{self._path}: more than {MAX_OBJECTS} objects")
        try:
            self.objects[name] = _decode(data, self._kind)
        except KubernetesError as error:
            self.objects.pop(name, None)
            self.unreadable[name] = str(error)
        else:
            self.unreadable.pop(name, None)
