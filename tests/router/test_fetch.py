"""Small questions to replicas that are given up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

from router.replicas.fetch import UpstreamFetch
from router.upstream import Origin, UpstreamClient, UpstreamError
from tests.support.vllm_publisher import free_port


async def test_a_question_given_up_while_it_fails_leaves_no_error_that_nobody_reads() -> None:
    """At a shutdown beside a dead replica it stood in the log as a crash of the router."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    client = UpstreamClient()
    fetch, nobody = UpstreamFetch(client), Origin.parse(f"http://127.0.0.1:{free_port()}")
    for passes in range(30):
        question = asyncio.create_task(fetch(nobody, "/health", (), 1.0, 1024))
        for _ in range(passes):
            await asyncio.sleep(0)
        question.cancel()
        with contextlib.suppress(asyncio.CancelledError, UpstreamError):
            await question
        gc.collect()
    await client.close()
    assert not complaints
