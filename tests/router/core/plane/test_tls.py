"""TLS at both sides of the compiled data plane: handshakes of any kind, ends that are cut, and as
much held back as without it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from router.plane.relays import IS_CONTROL
from router.plane.secured import NoTls, PemFiles, Secured, load_openssl
from tests.router.core.plane.harness import (
    LAST,
    NAME,
    Authority,
    Served,
    Way,
    read_all,
    read_request,
    replica,
    secured,
    serving,
)
from tests.router.core.tls.clients import InMemory, hello
from tests.support.waiting import DEADLINE_S

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LONG = bytes(range(256)) * 40_000  # 10 MB


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.contextmanager
def connected(served: Served, context: ssl.SSLContext | None = None) -> Iterator[socket.socket]:
    """A client's connection, plain without a context."""
    with socket.create_connection((NAME, served.port), timeout=DEADLINE_S) as plain:
        if context is None:
            yield plain
            return
        # A connection that ends without saying so must be seen by the tests.
        with context.wrap_socket(plain, server_hostname=NAME, suppress_ragged_eofs=False) as secure:
            yield secure


def answered(served: Served, context: ssl.SSLContext, request: bytes = LAST) -> bytes:
    with connected(served, context) as client:
        client.sendall(request)
        return read_all(client)


def no_client_can(authority: Authority) -> ssl.SSLContext:
    """A client of what nobody should speak any more."""
    context = authority.client_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
    return context


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (lambda _: GET, "not_tls"),
        (lambda _: b"\x80\x2e\x01\x03\x01" + bytes(43), "not_tls"),
        (lambda _: b"\x16\x03\x01\xff\xff" + bytes(70_000), "tls_handshake_failed"),
        (lambda _: b"\x17\x03\x03\x00\x20" + bytes(32), "tls_handshake_failed"),
        (lambda _: b"\x15\x03\x03\x00\x02\x02\x28", "tls_handshake_failed"),
        (lambda one: hello(one.client_context()) * 2, "tls_handshake_failed"),
        (lambda _: b"\x16\x03\x01\x00\x08\x01\x00\x00\x04abcd", "tls_handshake_failed"),
        (lambda one: hello(no_client_can(one)), "tls_handshake_failed"),
    ],
    ids=[
        *("plain HTTP", "SSL 2", "a record that is too long", "data before a handshake"),
        *("an alert", "a second hello", "a broken hello", "TLS 1.1"),
    ],
)
def test_a_handshake_that_is_none_is_ended_and_counted(
    authority: Authority, said: Callable[[Authority], bytes], code: str
) -> None:
    """The listener is for anyone: no response in plain text, and others are served."""
    with serving(secured(authority)) as served:
        with connected(served) as plain:
            plain.sendall(said(authority))
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                plain.shutdown(socket.SHUT_WR)
                answer = read_all(plain)
        assert not answer.startswith(b"HTTP")
        served.until(lambda: served.refused[code] == 1)
        assert answered(served, authority.client_context()).endswith(b"ok")


@pytest.mark.parametrize("said", [b"", b"\x16", None], ids=["silent", "a byte", "half a hello"])
def test_a_handshake_that_never_ends_is_ended_in_time(
    authority: Authority, said: bytes | None
) -> None:
    """Else anyone could hold connections for nothing."""
    first = hello(authority.client_context())[:200] if said is None else said
    with serving(secured(authority), request_s=0.3) as served, connected(served) as plain:
        plain.sendall(first)
        assert read_all(plain) == b""
        served.until(lambda: served.refused["slow_request"] == 1)


def test_a_handshake_may_come_byte_by_byte(authority: Authority) -> None:
    """The network cuts as it likes, and a record is not there before its last byte."""
    with serving(secured(authority)) as served, connected(served) as plain:
        client = InMemory(authority.client_context())

        def send(data: bytes) -> None:
            for at in range(len(data)):
                plain.sendall(data[at : at + 1])

        client.shake_hands(send, lambda: plain.recv(1))
        client.tls.write(GET)
        send(client.said())
        answer = b""
        while not answer.endswith(b"ok"):
            client.heard(plain.recv(1))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += client.tls.read(1000)


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [(["h2", "http/1.1"], "http/1.1"), (["http/1.1"], "http/1.1"), (["h2"], None), ([], None)],
)
def test_the_protocol_is_http_1_1_where_a_client_asks(
    authority: Authority, offered: list[str], chosen: str | None
) -> None:
    """A client that offers more would else speak another one."""
    context = authority.client_context()
    if offered:
        context.set_alpn_protocols(offered)
    with serving(secured(authority)) as served, connected(served, context) as client:
        assert isinstance(client, ssl.SSLSocket)
        assert client.selected_alpn_protocol() == chosen
        client.sendall(LAST)
        assert read_all(client).endswith(b"ok")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_connections_are_kept_and_sessions_resumed(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    """A handshake costs more than a request."""
    context = authority.client_context()
    context.maximum_version = version
    with serving(secured(authority)) as served:
        with connected(served, context) as client:
            assert isinstance(client, ssl.SSLSocket)
            for _ in range(3):
                client.sendall(GET)
                assert b"200 OK" in client.recv(65536)
            session = client.session
        with (
            connected(served) as plain,
            context.wrap_socket(plain, server_hostname=NAME, session=session) as again,
        ):
            assert again.session_reused
            again.sendall(LAST)
            assert read_all(again).endswith(b"ok")


def test_a_client_that_sends_no_more_may_still_read(authority: Authority) -> None:
    """Its close_notify is about its own direction, as a FIN is."""
    with serving(secured(authority)) as served, connected(served) as plain:
        client = InMemory(authority.client_context())
        client.shake_hands(plain.sendall, lambda: plain.recv(65536))
        client.tls.write(GET)
        with contextlib.suppress(ssl.SSLWantReadError):
            client.tls.unwrap()
        plain.sendall(client.said())
        client.heard(read_all(plain))
        assert client.read_all().endswith(b"ok")


def respond_long(connection: socket.socket) -> None:
    """Serve requests with a body that no buffer takes."""
    while read_request(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(LONG) + LONG)


def test_long_bodies_go_both_ways_whole(authority: Authority) -> None:
    """Records, chunks and what the kernel takes have sizes of their own."""
    got: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        got.append(read_request(connection).partition(b"\r\n\r\n")[2])
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(LONG) + LONG)

    sent = LONG[: 5 << 20]
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with (
        replica(handle, authority.server_context()) as port,
        serving(secured(authority), Way(port, [NAME], NAME)) as served,
    ):
        answer = answered(served, authority.client_context(), head % len(sent) + sent)
    assert answer.partition(b"\r\n\r\n")[2] == LONG
    assert got == [sent]


def test_a_client_that_does_not_read_holds_its_replica_back_and_is_ended(
    authority: Authority,
) -> None:
    """What is encrypted already counts as unsent; the memory of the router is not for it."""
    with (
        replica(respond_long, authority.server_context()) as port,
        serving(secured(authority), Way(port, [NAME], NAME), client_stall_s=0.5) as served,
        connected(served, authority.client_context()) as client,
    ):
        client.sendall(GET)
        served.until(lambda: served.ended == ["client_stalled"])


def test_a_page_that_is_not_read_is_counted_as_refused() -> None:
    """No request of a model's: nothing else tells of it."""
    with (
        replica(respond_long) as port,
        serving(Secured(), Way(port, [NAME], flags=IS_CONTROL), client_stall_s=0.5) as served,
        connected(served) as client,
    ):
        client.sendall(GET)
        served.until(lambda: served.refused["response_not_read"] == 1)


def test_connections_to_replicas_are_kept(authority: Authority) -> None:
    """Also where tickets come while nobody asks anything."""
    with (
        replica(respond_long, authority.server_context()) as port,
        serving(secured(authority, is_server=False), Way(port, [NAME], NAME)) as served,
    ):
        with connected(served) as client:
            for _ in range(3):
                client.sendall(GET)
                answer = b""
                while len(answer) < len(LONG):
                    answer += client.recv(1 << 20)
                served.until(lambda: served.plane.counts()["idle"] == 1)
        assert served.plane.counts()["opened"] == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [("other.example", "IP address mismatch"), ("foreign", "certificate"), ("plain", "version")],
)
def test_a_replica_that_cannot_be_trusted_gets_no_request(
    authority: Authority, tmp_path: Path, name: str, why: str
) -> None:
    """Whoever is at its address would else read prompts and keys."""
    seen: list[bytes] = []

    def handle(connection: socket.socket) -> None:
        seen.append(connection.recv(1))
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    (tmp_path / "other").mkdir()
    contexts = {
        "other.example": authority.server_context("other.example"),
        "foreign": Authority(tmp_path / "other").server_context(),
        "plain": None,
    }
    with (
        replica(handle, contexts[name]) as port,
        serving(secured(authority, is_server=False), Way(port, [NAME], NAME)) as served,
    ):
        with connected(served) as client:
            client.sendall(LAST)
            assert b"502" in read_all(client)
        ((failure, said),) = served.failed
        assert failure == "connect"
        assert why in said, said
    assert not seen or seen == [b"\x16"], "only the handshake has begun"


@pytest.mark.parametrize("is_said", [True, False], ids=["said", "cut"])
def test_a_body_of_unknown_length_is_whole_only_where_its_end_was_said(
    authority: Authority, is_said: bool
) -> None:
    """Whoever is between could else cut it, and nobody would see."""

    def handle(connection: socket.socket) -> None:
        assert isinstance(connection, ssl.SSLSocket)
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall")
        if is_said:
            with contextlib.suppress(OSError):
                connection.unwrap()
        else:
            connection.shutdown(socket.SHUT_RDWR)

    with (
        replica(handle, authority.server_context()) as port,
        serving(secured(authority, is_server=False), Way(port, [NAME], NAME)) as served,
    ):
        with connected(served) as client, contextlib.suppress(ConnectionResetError):
            client.sendall(LAST)
            read_all(client)
        served.until(lambda: len(served.ended) == 1)
    assert served.ended == ["completed" if is_said else "replica_died"]


def test_renewed_certificates_are_for_new_connections(authority: Authority, tmp_path: Path) -> None:
    """Those that are open stay."""
    (tmp_path / "new").mkdir()
    new = Authority(tmp_path / "new")
    with serving(secured(authority)) as served:
        with connected(served, authority.client_context()) as client:
            served.plane.secure(*secured(new))
            client.sendall(LAST)
            assert read_all(client).endswith(b"ok")
        assert answered(served, new.client_context()).endswith(b"ok")
        with (
            pytest.raises(ssl.SSLCertVerificationError),
            connected(served, authority.client_context()),
        ):
            pass


def test_what_cannot_be_used_is_named(authority: Authority, tmp_path: Path) -> None:
    """By its path and the reason, as an operator needs them."""
    load_openssl()
    good, other = authority.issued(), authority.issued("other.example")
    missing = str(tmp_path / "missing.pem")
    for files, said in (
        (PemFiles(missing, good.key), f"{missing}: No such file"),
        (PemFiles(good.certificate, other.key), "key values mismatch"),
        (PemFiles(good.certificate, good.key, missing), "missing.pem: "),
        (PemFiles(good.certificate, good.key, good.key), "no certificate"),
    ):
        with pytest.raises(NoTls, match=said):
            Secured.made(files, PemFiles())
