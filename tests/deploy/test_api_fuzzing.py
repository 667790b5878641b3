"""Requests that Schemathesis makes from the OpenAPI document, to a router before a small engine."""

from __future__ import annotations

import asyncio

from tests.deploy.files import succeeds, tool
from tests.support.engine_process import engine_processes, simulated
from tests.support.router_process import router_process


async def test_nothing_that_the_description_allows_is_a_fault_of_the_router() -> None:
    """What is odd gets a 4xx that says why; a 5xx would wake someone."""
    schemathesis = tool("schemathesis", "none; make tools")
    with router_process() as router:
        async with engine_processes(1, *simulated("gemma")) as (engine,), router.serving(engine):
            said = await asyncio.to_thread(
                succeeds,
                *(schemathesis, "run", f"{router.url}/openapi.json", "--no-color"),
                *("--checks", "not_a_server_error", "--phases", "coverage,fuzzing"),
                *("--max-examples", "5", "--generation-deterministic"),
                # A recording lasts until it is ended. 503 is right where a gateway names replicas
                # of which none is there, and where one was added that has not said what it serves.
                *("--exclude-path-regex", "recording$|^/replicas$|^/select"),
            )
            assert " passed" in said
            assert (await router.get("/healthz")).status == 200
