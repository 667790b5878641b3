"""Where to pull from, in a request's body: the router says it, and no client."""

from __future__ import annotations

import json

import pytest

from router.prompt.body.owned_fields import strip_hints, with_source
from router.prompt.body.requests import read_request
from router.prompt.endpoints import Endpoint


def test_the_peer_is_named_as_engines_read_it() -> None:
    """Beside what the client says to other connectors, with an id of its own for each attempt."""
    body = b'{"prompt": [1,  2], "kv_transfer_params": {"do_remote_decode": false}}'
    told = [json.loads(with_source(body, "10.0.0.5", 7777)) for _ in range(2)]
    names = [each["kv_transfer_params"]["remote_kv_source"].pop("kv_request_id") for each in told]
    assert len({*names}) == 2
    address = {"remote_host": "10.0.0.5", "remote_port": 7777}
    for each in told:
        params = {"remote_kv_source": address, "do_remote_decode": False}
        assert each == {"prompt": [1, 2], "kv_transfer_params": params}
    assert json.loads(strip_hints(with_source(b'{"a":1}', "h", 1))) == {
        "a": 1,
        "kv_transfer_params": {},
    }


@pytest.mark.parametrize("name", ["remote_kv_source", "remote_k\\u0076_source"])
def test_a_client_does_not_say_where_an_engine_connects(name: str) -> None:
    """It could name any address of the engines' network."""
    source = '{"kv_request_id":"x","remote_host":"192.0.2.1","remote_port":22}'
    body = f'{{"prompt":"a","kv_transfer_params":{{"{name}":{source},"other":1}}}}'
    _, sent = read_request(body.encode(), Endpoint.COMPLETIONS, "json")
    assert sent is not None
    assert json.loads(sent) == {"prompt": "a", "kv_transfer_params": {"other": 1}}
