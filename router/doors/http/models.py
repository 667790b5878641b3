"""The models and adapters that clients may ask for, as OpenAI's API lists them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from router.doors.asks import Key
from router.doors.http.bodies import json_response
from router.doors.http.openapi import Access, described, sends
from router.doors.http.views import ModelEntry, ModelList
from router.errors import UnknownModel
from router.fleet.registry import ReplicaRegistry
from router.fleet.replica import Replica
from router.routing.models import ModelSet


def add_models(app: FastAPI, known: ModelSet, registry: ReplicaRegistry, client: Access) -> None:
    """Add `/v1/models`, and the path of each model."""

    @app.get(
        "/v1/models",
        **described(
            "routing",
            "Models and adapters that some healthy replica serves",
            {200: sends(ModelList, "As in OpenAI's API.")},
            access=client,
        ),
    )
    async def models(request: Request) -> Response:
        names = known.names()
        allowed = {name: names[name] for name in names if _may_use(request, name)}
        healthy = _healthy(registry)
        return json_response(model_list(allowed, lambda name: known.serving(name, healthy)))

    @app.get(
        "/v1/models/{name:path}",
        **described(
            "routing",
            "One of them",
            {200: sends(ModelEntry, "As in OpenAI's API.")},
            access=client,
            errors=(UnknownModel("gemma-4"),),
        ),
    )
    async def model(request: Request, name: str) -> Response:
        serving = known.serving(name, _healthy(registry))
        names = known.names()
        if name not in names or not serving or not _may_use(request, name):
            raise UnknownModel(name)
        return json_response(model_entry(name, names[name], serving))


def _may_use(request: Request, model: str) -> bool:
    """Return whether the client's key is for a model or adapter."""
    key: Key = request.state.key
    return key.usage is None or key.usage.allows(model)


def _healthy(registry: ReplicaRegistry) -> list[Replica]:
    """Return the healthy replicas that take requests."""
    return [each for each in registry.replicas() if each.is_healthy and each.takes_requests]


def model_list(
    names: Mapping[str, str | None], serving_of: Callable[[str], Sequence[Replica]]
) -> dict[str, Any]:
    """The models that clients may ask for: a `ModelList` whose entries keep all that engines
    report.

    Args:
        names: Every known model and adapter, with the model that an adapter is for.
        serving_of: The healthy replicas that can take requests for a name.
    """
    entries = [
        model_entry(name, parent, serving)
        for name, parent in sorted(names.items())
        if (serving := serving_of(name))
    ]
    return {"object": "list", "data": entries}


def model_entry(name: str, parent: str | None, serving: Sequence[Replica]) -> dict[str, Any]:
    """One model: a `ModelEntry`, and all else that the first replica reports.

    Args:
        serving: The healthy replicas that serve it.
    """
    entry = ModelEntry(id=name, created=int(time.time()), root=parent or name, parent=parent)
    entries = [_entry_of(name, replica) for replica in serving]
    lengths = [length for one in entries if type(length := one.get("max_model_len")) is int]
    found = {**msgspec.to_builtins(entry), **(entries[0] if entries else {})}
    found |= {"id": name, "parent": parent}
    if lengths:
        # A client must not send more than the replica that its request may go to takes.
        found["max_model_len"] = min(lengths)
    return found


def _entry_of(name: str, replica: Replica) -> dict[str, Any]:
    """Return a replica's entry for a model; where it has another name for it, only how much that
    takes."""
    found = replica.model_entries.get(name)
    if found is not None:
        return found
    lengths = [
        length
        for other in replica.served.models
        if type(length := replica.model_entries.get(other, {}).get("max_model_len")) is int
    ]
    return {"max_model_len": min(lengths)} if lengths else {}
