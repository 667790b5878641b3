"""The end of a router, as the server behind the data plane decides it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from starlette.types import Receive, Scope, Send

from router.config.certificates import Certificate
from router.errors import ConfigError
from router.routing.admission import Admission
from router.serve.control import ControlServer, PlaneCertificates
from tests.router.plane.server import one_client
from tests.support.waiting import eventually

LONG = b"x" * 10_000_000


def test_a_file_that_cannot_be_used_is_named_by_its_own_option(tmp_path: Path) -> None:
    """Files change between the check and the use. Replicas' authorities were blamed on the
    listener, whose files an operator then looked at."""
    authority, shown = trustme.CA(), tmp_path / "shown.pem"
    trusted = tmp_path / "trusted.pem"
    authority.issue_cert("router.test").private_key_and_cert_chain_pem.write_to_path(shown)
    authority.cert_pem.write_to_path(trusted)
    listener = Certificate("server.tls", True, str(shown), str(shown), None)
    replicas = Certificate("server.replica_tls", False, None, None, str(trusted))
    trusted.write_text("")
    with pytest.raises(ConfigError, match=r"server\.replica_tls"):
        PlaneCertificates(listener, replicas)
    authority.cert_pem.write_to_path(trusted)
    shown.write_text("")
    with pytest.raises(ConfigError, match=r"server\.tls"):
        PlaneCertificates(listener, replicas)


async def nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that is not asked."""


async def test_it_waits_for_clients_that_have_not_read_all_of_a_whole_response() -> None:
    """Nothing of theirs is under way any more, and a router that ends would cut them off."""
    async with one_client(receive_buffer=2048) as (served, client):
        served.goes = False
        await client.send("GET", "/x")
        (await served.until_waiting()).respond(LONG)
        await eventually(lambda: served.plane.unread() == 1, "it is sent in part")
        counts = {"prepared": lambda: 0, "streams": lambda: 0}
        server = ControlServer(nowhere, Admission(1), 60.0, served.plane, None, **counts)
        server.stop()
        assert not await server.on_tick(1)
        assert (await client.read_answer()).body == LONG
        await eventually(lambda: served.plane.unread() == 0, "it has all of it")
        assert not await server.on_tick(1), "one that is handed over may count nowhere just now"
        assert await server.on_tick(1)
