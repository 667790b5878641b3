"""Small requests to replicas that are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from typing import Any

import pytest

from router.config.origin import Origin
from router.fleet.client import UpstreamClient
from router.fleet.client_errors import UpstreamError
from router.fleet.watcher import UpstreamFetch
from tests.support.engine_stub import engines
from tests.support.vllm_publisher import free_port


async def test_a_request_cancelled_while_it_fails_leaves_no_unread_error() -> None:
    """At a shutdown beside a dead replica it would be logged as a crash of the router."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    client = UpstreamClient()
    fetch, no_server = UpstreamFetch(client), Origin.parse(f"http://127.0.0.1:{free_port()}")
    for passes in range(30):
        request = asyncio.create_task(fetch(no_server, "/health", (), 1.0, 1024))
        for _ in range(passes):
            await asyncio.sleep(0)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError, UpstreamError):
            await request
        gc.collect()
    await client.close()
    assert not complaints


async def test_a_request_cancelled_while_its_response_arrives_is_cancelled() -> None:
    """Before Python 3.12 `asyncio.wait_for` swallows a cancellation that meets the end of what it
    waits for."""
    client = UpstreamClient()
    fetch = UpstreamFetch(client)
    ends: Counter[str] = Counter()
    async with engines(1) as (stub,):
        origin = Origin.parse(stub.url)
        for passes in range(40):
            await fetch(
                origin, "/health", (), 5.0, 1024
            )  # the next takes its connection, which makes it quick
            request = asyncio.create_task(fetch(origin, "/health", (), 5.0, 1024))
            for _ in range(passes):
                await asyncio.sleep(0)
            if request.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await request
                ends["cancelled"] += 1
            else:
                assert (await request)[0] == 200
                ends["completed"] += 1
    await client.close()
    assert min(ends["cancelled"], ends["completed"]) > 0
