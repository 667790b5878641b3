"""Names are resolved again when their records expire, by a real resolver and a real server."""

from __future__ import annotations

from pathlib import Path

import dns.rcode
import dns.resolver
import pytest
from pydantic import ValidationError

from router.config.discovery import DnsDiscovery, name_server
from router.config.replica import ReplicaOptions
from router.fleet.discovery.dns import DnsProvider
from tests.router.fleet.discovery.found import following
from tests.support.dns_server import dns_server
from tests.support.waiting import eventually

NAME = "engines.models.svc.example"


def provider(nameserver: str, **options: object) -> DnsProvider:
    given = {"port": 8000} if options.get("record") != "srv" else {}
    times = {"min_interval_s": 0.02, "max_interval_s": 0.1}
    return DnsProvider(
        DnsDiscovery.model_validate(
            {"name": NAME, "nameserver": nameserver, **given, **times, **options}
        )
    )


async def test_every_address_of_a_name_is_a_replica() -> None:
    """Of both kinds, and what is configured is true of all."""
    async with dns_server() as (server, address):
        server.records[NAME, "A"] = 1, ["10.0.0.2", "10.0.0.1"]
        server.records[NAME, "AAAA"] = 1, ["fd00::1"]
        options = ReplicaOptions(speed=2.0)
        async with following(provider(address, replica=options, scheme="https")) as found:
            await eventually(lambda: found.lists, "a list")
            assert sorted(found.urls.values()) == [
                "https://10.0.0.1:8000",
                "https://10.0.0.2:8000",
                "https://[fd00::1]:8000",
            ]
            assert {replica.speed for replica in found.replicas.values()} == {2.0}


async def test_records_that_change_are_noticed_when_they_expire() -> None:
    """Their time to live says when to ask again, within bounds."""
    async with dns_server() as (server, address):
        server.records[NAME, "A"] = 0, ["10.0.0.1"]
        async with following(provider(address)) as found:
            await eventually(lambda: found.lists, "a list")
            server.records[NAME, "A"] = 0, ["10.0.0.1", "10.0.0.2"]
            await eventually(lambda: len(found.urls) == 2, "another address")
            server.records[NAME, "A"] = 0, ["10.0.0.2"]
            await eventually(lambda: list(found.urls) == ["10.0.0.2:8000"], "one less")


async def test_an_srv_record_names_host_and_port() -> None:
    """Only the most preferred priority counts (RFC 2782)."""
    async with dns_server() as (server, address):
        server.records[NAME, "SRV"] = (
            1,
            ["0 1 8001 vllm-0.engines.", "0 9 8002 vllm-1.engines.", "1 1 8003 standby.engines."],
        )
        async with following(provider(address, record="srv")) as found:
            await eventually(lambda: found.lists, "a list")
            assert found.urls == {
                "vllm-0.engines:8001": "http://vllm-0.engines:8001",
                "vllm-1.engines:8002": "http://vllm-1.engines:8002",
            }


@pytest.mark.parametrize("fault", ["SERVFAIL", "REFUSED", "NXDOMAIN", "empty"])
async def test_a_resolver_in_trouble_empties_no_list(fault: str) -> None:
    """Also where it says that there is no such name: one that has lost its data says so, and the
    replicas' own health tells which are gone."""
    async with dns_server() as (server, address):
        server.records[NAME, "A"] = 0, ["10.0.0.1"]
        async with following(provider(address)) as found:
            await eventually(lambda: found.lists, "a list")
            known = server.records.pop((NAME, "A"))
            if fault == "empty":
                server.records[NAME, "TXT"] = 0, ["there-is-something-else"]
            else:
                server.rcode = dns.rcode.from_text(fault)
            await eventually(lambda: found.failures, "a failure")
            assert list(found.urls) == ["10.0.0.1:8000"]
            server.rcode = dns.rcode.NOERROR
            server.records[NAME, "A"] = known
            lists = len(found.lists)
            await eventually(lambda: len(found.lists) > lists, "asked again")


async def test_a_server_that_fails_only_for_one_kind_of_address_has_the_others_read() -> None:
    """Some respond with SERVFAIL to AAAA, always: the replicas are those of the A records, and what
    is missing is shown."""
    async with dns_server() as (server, address):
        server.refused_kinds = {"AAAA"}
        server.records[NAME, "A"] = 0, ["10.0.0.1"]
        async with following(provider(address)) as found:
            await eventually(lambda: found.lists, "a list")
            assert list(found.urls) == ["10.0.0.1:8000"]
            assert found.broken[0].startswith("AAAA: NoNameservers")
            server.records[NAME, "A"] = 0, ["10.0.0.2"]
            await eventually(lambda: list(found.urls) == ["10.0.0.2:8000"], "it is followed")
            assert not found.failures


async def test_a_kind_of_address_that_fails_for_a_while_keeps_its_replicas() -> None:
    """They are no less there for the server's trouble; those of the other kind are followed."""
    async with dns_server() as (server, address):
        server.records[NAME, "A"] = 0, ["10.0.0.1"]
        server.records[NAME, "AAAA"] = 0, ["fd00::1"]
        async with following(provider(address)) as found:
            await eventually(lambda: found.lists, "a list")
            server.refused_kinds = {"A"}
            server.records[NAME, "AAAA"] = 0, ["fd00::2"]
            await eventually(
                lambda: "http://[fd00::2]:8000" in found.urls.values(), "the other kind is followed"
            )
            await eventually(lambda: found.broken, "the failure is shown")
            assert sorted(found.urls.values()) == ["http://10.0.0.1:8000", "http://[fd00::2]:8000"]
            server.refused_kinds = set()
            server.records.pop((NAME, "A"))
            await eventually(lambda: list(found.urls.values()) == ["http://[fd00::2]:8000"], "both")
            assert not found.broken


async def test_a_server_that_does_not_answer_is_a_failure() -> None:
    """The look-up has a bound of its own."""
    async with dns_server() as (server, address):
        server.is_silent = True
        async with following(provider(address)) as found:
            await eventually(lambda: found.failures, "a failure")
            assert "LifetimeTimeout" in found.failures[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": None}, "is missing; addresses need one"),
        ({"record": "srv", "port": 8000}, "an SRV record has a port of its own"),
        ({"min_interval_s": 60.0}, r"must be at most max_interval_s \(30\)"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, object], message: str
) -> None:
    """With their place."""
    with pytest.raises(ValidationError, match=message):
        DnsDiscovery.model_validate({"name": NAME, "port": 8000, **options})


async def test_a_system_without_a_resolver_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its configuration may come later, as may the network: the router did not start."""
    path = tmp_path / "resolv.conf"
    monkeypatch.setattr("router.fleet.discovery.dns.SYSTEM", path)
    async with following(provider_of_the_system()) as found:
        await eventually(lambda: len(found.failures) > 1, "it asks again")
        assert found.failures[-1].startswith("NoResolverConfiguration")
        path.write_text("nameserver 127.0.0.1\n")
        await eventually(
            lambda: not found.failures[-1].startswith("NoResolverConfiguration"), "it asks there"
        )


async def test_the_systems_servers_are_read_again_when_they_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine's network may move under the router; those that are known are asked
    where the file is gone for a moment."""
    path = tmp_path / "resolv.conf"
    monkeypatch.setattr("router.fleet.discovery.dns.SYSTEM", path)
    async with dns_server("127.0.0.2") as (before, first):
        port = name_server(first)[1]
        async with dns_server("127.0.0.3", port) as (after, _):
            ask_at_port(monkeypatch, port)
            before.records[NAME, "A"] = 0, ["10.0.0.1"]
            after.records[NAME, "A"] = 0, ["10.0.0.2"]
            path.write_text("nameserver 127.0.0.2\n")
            async with following(provider_of_the_system()) as found:
                await eventually(lambda: list(found.urls) == ["10.0.0.1:8000"], "the first server")
                path.unlink()
                lists = len(found.lists)
                await eventually(lambda: len(found.lists) > lists + 1, "it is asked still")
                path.write_text("nameserver 127.0.0.3\n")
                await eventually(lambda: list(found.urls) == ["10.0.0.2:8000"], "the new one")
                assert not found.failures


def provider_of_the_system() -> DnsProvider:
    """A provider that asks the servers in the system's file."""
    config = {"name": NAME, "port": 8000, "max_interval_s": 0.1, "min_interval_s": 0.02}
    return DnsProvider(DnsDiscovery.model_validate(config))


def ask_at_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Have the system's servers asked at *port*: 53 is the administrator's to open."""
    reset = dns.resolver.BaseResolver.reset

    def with_port(resolver: dns.resolver.BaseResolver) -> None:
        reset(resolver)
        resolver.port = port

    monkeypatch.setattr(dns.resolver.BaseResolver, "reset", with_port)
