"""TLS at both sides of the router: who may connect, what is refused, renewal without a restart."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme

from tests.e2e.test_endpoint_picker import health, picker_of
from tests.support.engine_stub import EngineStub, engines
from tests.support.router_process import QUICK_HEALTH, RouterProcess, router_process
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm_start import COMMAND, ROOT

NAME = "127.0.0.1"
EXPIRED = datetime(2020, 1, 1, tzinfo=timezone.utc)


def issue(ca: trustme.CA, directory: Path, name: str, **options: Any) -> dict[str, str]:
    """A certificate with its key as files, for an option of the configuration."""
    issued = ca.issue_cert(NAME, **options)
    paths = directory / f"{name}.pem", directory / f"{name}.key"
    write(issued, *paths)
    return {"certificate": str(paths[0]), "key": str(paths[1])}


def write(issued: trustme.LeafCert, certificate: Path, key: Path) -> None:
    """Each by renaming, as programs that renew certificates do."""
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    for path, content in ((certificate, chain), (key, issued.private_key_pem.bytes())):
        written = path.with_suffix(".new")
        written.write_bytes(content)
        written.replace(path)


def trusting(ca: trustme.CA, shown: dict[str, str] | None = None) -> ssl.SSLContext:
    """A client's context."""
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if shown is not None:
        context.load_cert_chain(shown["certificate"], shown["key"])
    return context


def configured(*stubs: EngineStub, **server: Any) -> dict[str, Any]:
    replicas = [{"url": stub.url, "id": stub.name} for stub in stubs]
    return {"health": QUICK_HEALTH, "replicas": replicas, "server": server}


@asynccontextmanager
async def client(
    router: RouterProcess, context: ssl.SSLContext
) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"https://{NAME}:{router.port}", verify=context, timeout=DEADLINE_S
    ) as made:
        yield made


async def until_ready(http: httpx.AsyncClient) -> None:
    while (await http.get("/readyz")).status_code != 200:
        await asyncio.sleep(0.05)


async def test_everything_is_served_over_https(tmp_path: Path) -> None:
    """Whole responses and streams, on the direct path and through the API; the replica learns by
    which scheme its client came."""
    ca = trustme.CA()
    async with engines(1) as (stub,):
        with router_process(configured(stub, tls=issue(ca, tmp_path, "router"))) as router:
            async with client(router, trusting(ca)) as http:
                await until_ready(http)
                body = {"model": stub.model, "prompt": [1, 2, 3]}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                streamed = await http.post("/v1/completions", json={**body, "stream": True})
                assert streamed.text.endswith("data: [DONE]\n\n")
                assert "kvroute_requests_total" in (await http.get("/metrics")).text
            assert stub.requests[-1].headers["x-forwarded-proto"] == "https"


async def test_a_plaintext_client_is_turned_away_and_others_are_served(tmp_path: Path) -> None:
    """Also one that connects and says nothing sensible; the log has no traceback."""
    ca = trustme.CA()
    with router_process(configured(tls=issue(ca, tmp_path, "router"))) as router:
        for said in (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" * 100):
            with socket.create_connection((NAME, router.port), timeout=DEADLINE_S) as plain:
                plain.sendall(said)
                plain.shutdown(socket.SHUT_WR)
                answer = b""
                try:
                    while part := plain.recv(4096):
                        answer += part
                except ConnectionResetError:
                    pass
                assert not answer.startswith(b"HTTP")
        async with client(router, trusting(ca)) as http:
            assert (await http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("shown", ["none", "other authority", "expired"])
async def test_clients_without_a_valid_certificate_do_not_get_in(
    tmp_path: Path, shown: str
) -> None:
    """Where they need one, not even a key or a probe helps."""
    ca, other = trustme.CA(), trustme.CA()
    ca_file = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(ca_file)
    certificates: dict[str, dict[str, str] | None] = {
        "none": None,
        "other authority": issue(other, tmp_path, "other"),
        "expired": issue(ca, tmp_path, "old", not_after=EXPIRED),
    }
    tls = {**issue(ca, tmp_path, "router"), "client_ca": str(ca_file)}
    with router_process(configured(tls=tls)) as router:
        async with client(router, trusting(ca, certificates[shown])) as http:
            # The alert that says why, which httpx passes on as it is, or the connection's end.
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await http.get("/healthz")
        good = issue(ca, tmp_path, "client")
        async with client(router, trusting(ca, good)) as http:
            assert (await http.get("/healthz")).status_code == 200


async def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    """Connections that are open stay, new ones are shown the new one; a pair that does not belong
    together is refused."""
    ca = trustme.CA()
    files = issue(ca, tmp_path, "router")
    paths = Path(files["certificate"]), Path(files["key"])
    with router_process(configured(tls=files)) as router:
        async with client(router, trusting(ca)) as http:
            assert (await http.get("/healthz")).status_code == 200
            before = await serial_number(router, ca)
            paths[0].write_bytes(ca.issue_cert(NAME).cert_chain_pems[0].bytes())
            await eventually(lambda: "renewed certificate is refused" in router.log(), "refused")
            assert await serial_number(router, ca) == before
            write(ca.issue_cert(NAME), *paths)
            await eventually(lambda: "renewed certificate is in use" in router.log(), "in use")
            assert await serial_number(router, ca) != before
            assert (await http.get("/healthz")).status_code == 200


async def test_clients_of_renewed_authorities_get_in_and_those_of_the_old_ones_no_more(
    tmp_path: Path,
) -> None:
    """An authority whose key was stolen must not be trusted until somebody thinks of a restart."""
    old, new = trustme.CA(), trustme.CA()
    ca_file = tmp_path / "ca.pem"
    old.cert_pem.write_to_path(ca_file)
    tls = {**issue(old, tmp_path, "router"), "client_ca": str(ca_file)}
    shown = {ca: issue(ca, tmp_path, f"client-{at}") for at, ca in enumerate((old, new))}
    with router_process(configured(tls=tls)) as router:
        async with client(router, trusting(old, shown[old])) as http:
            assert (await http.get("/healthz")).status_code == 200
        new.cert_pem.write_to_path(ca_file)
        await eventually(lambda: "server.tls: the renewed" in router.log(), "in use")
        async with client(router, trusting(old, shown[new])) as http:
            assert (await http.get("/healthz")).status_code == 200
        async with client(router, trusting(old, shown[old])) as http:
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await http.get("/healthz")


async def test_the_picker_shows_a_renewed_certificate(tmp_path: Path) -> None:
    """It had the old one until a restart, and no gateway in once that had expired."""
    old, new = trustme.CA(), trustme.CA()
    tls = issue(old, tmp_path, "picker")
    files = Path(tls["certificate"]), Path(tls["key"])
    config = {**configured(), "doors": {"ext_proc": {"listen": f"{NAME}:0", "tls": tls}}}
    with router_process(config) as router:

        async def serves(authority: trustme.CA) -> bool:
            try:
                found = await health(picker_of(router), "liveness", authority.cert_pem.bytes())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
            return found == 1

        assert await serves(old)
        files[1].write_bytes(new.issue_cert(NAME).private_key_pem.bytes())
        await eventually(lambda: "a renewed certificate is refused" in router.log(), "it is seen")
        assert await serves(old), "the pair does not belong together"
        write(new.issue_cert(NAME), *files)
        await eventually(lambda: "ext_proc.tls: the renewed" in router.log(), "in use")
        assert await serves(new)
        assert not await serves(old)
        assert "a renewed certificate is refused" in router.log()
        assert "doors.ext_proc.tls: the renewed certificate is in use" in router.log()


async def test_replicas_of_renewed_authorities_are_trusted_and_those_of_the_old_ones_no_more(
    tmp_path: Path,
) -> None:
    """By health checks, on connections that they have kept as well, and by requests."""
    old, new = trustme.CA(), trustme.CA()
    ca_file = tmp_path / "ca.pem"
    old.cert_pem.write_to_path(ca_file)

    def shows(authority: trustme.CA) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(NAME).configure_cert(context)
        return context

    stubs = [EngineStub("served-over-tls", tls=shows(ca)) for ca in (old, new)]
    async with stubs[0] as of_old, stubs[1] as of_new:
        server = {"replica_tls": {"ca": str(ca_file)}}
        with router_process(configured(of_old, of_new, **server)) as router:
            await until_only_healthy(router, of_old, of_new)
            new.cert_pem.write_to_path(ca_file)
            await until_only_healthy(router, of_new, of_old)
            body = {"model": of_new.model, "prompt": [1, 2, 3]}
            answer = await router.post("/v1/completions", body)
            assert (answer.status, answer.headers["x-kv-replica"]) == (200, of_new.name)


async def until_only_healthy(router: RouterProcess, one: EngineStub, other: EngineStub) -> None:
    await router.until(
        lambda now: (
            now.sum("kvroute_replica_state", replica=one.name, state="healthy") == 1
            and now.sum("kvroute_replica_state", replica=other.name, state="unhealthy") == 1
        ),
        f"only {one.name} is healthy",
    )


async def serial_number(router: RouterProcess, ca: trustme.CA) -> str:
    """Of the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection(
        NAME, router.port, ssl=trusting(ca), server_hostname=NAME
    )
    shown: dict[str, Any] = writer.get_extra_info("peercert")
    writer.close()
    return str(shown["serialNumber"])


async def test_replicas_are_verified_and_shown_who_asks(tmp_path: Path) -> None:
    """Against an authority of one's own; a replica of another one gets no request."""
    ca, other = trustme.CA(), trustme.CA()
    ca_file = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(ca_file)

    def shows(authority: trustme.CA) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(NAME).configure_cert(context)
        context.verify_mode = ssl.CERT_REQUIRED
        ca.configure_trust(context)
        return context

    good, foreign = (
        EngineStub("served-over-tls", tls=shows(ca)),
        EngineStub("served-over-tls", tls=shows(other)),
    )
    async with good, foreign:
        replica_tls = {"ca": str(ca_file), **issue(ca, tmp_path, "client")}
        with router_process(configured(good, foreign, replica_tls=replica_tls)) as router:
            await router.until(
                lambda now: now.sum("kvroute_replica_healthy", replica=good.name) == 1, "healthy"
            )
            await router.until(
                lambda now: now.sum(
                    "kvroute_replica_state", replica=foreign.name, state="unhealthy"
                ),
                "the other is refused",
            )
            said = (await router.replica(foreign.name))["last_error"]
            assert "certificate verify failed" in said, said
            for _ in range(4):
                body = {"model": good.model, "prompt": [1, 2, 3]}
                answer = await router.post("/v1/completions", body)
                assert answer.headers["x-kv-replica"] == good.name


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        ({"certificate": "{cert}"}, "server.tls: must have both certificate and key, or neither"),
        ({"client_ca": "{cert}"}, "server.tls.client_ca: there must be a certificate"),
        ({"certificate": "no.pem", "key": "{key}"}, "No such file or directory"),
        ({"certificate": "{key}", "key": "{key}"}, "server.tls.certificate: "),
        ({"certificate": "{cert}", "key": "{other}"}, "KEY_VALUES_MISMATCH"),
        (
            {"certificate": "{cert}", "key": "{key}", "client_ca": "{key}"},
            "server.tls.client_ca: ",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused_at_the_start(
    tmp_path: Path, tls: dict[str, str], message: str
) -> None:
    """By `--check` as well, with their place."""
    ca = trustme.CA()
    files = issue(ca, tmp_path, "router")
    named = {
        "cert": files["certificate"],
        "key": files["key"],
        "other": issue(ca, tmp_path, "other")["key"],
    }
    given = {name: value.format(**named) for name, value in tls.items()}
    path = tmp_path / "kvroute.yaml"
    path.write_text(f"server: {{tls: {given}}}")
    done = subprocess.run(
        [*COMMAND, "serve", "--config", str(path), "--check"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
