"""The paths of other indexers, under a prefix for each: `/mooncake`, `/dynamo`. A program's base
URL of one of those can be replaced by this router's. None of them knows KV cache groups, so their
one number is the hit that all groups allow; the groups' own stand beside it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from fastapi import Depends, FastAPI, Request, Response

from kvevents.events import BlockHash
from router.config.replica import read_replica
from router.doors.asks import Key, tenant_salt
from router.doors.http.bodies import decode_body, json_response, read_request
from router.doors.http.decision_views import tokens_with_memory
from router.doors.http.networks import Networks
from router.doors.http.openapi import Access
from router.doors.names import worker_number
from router.errors import BadRequest, UnknownReplica
from router.fleet.replica import Replica
from router.index.base import GroupHit, Hit
from router.index.prompt import HashedPrompt
from router.prompt.body.salting import tenant_salt_of
from router.routing.model import Model
from router.telemetry.parts import RouterParts

_TokenIds = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]], msgspec.Meta(min_length=1)
]
_MOST_HASHES = 65_536
_HASHES_AT_ONCE = 65_536
"""Hashes looked up before others have their turn on the event loop: some milliseconds."""
_MOST_HASH_DIGITS = 1024
_Hashes = Annotated[list[int | str], msgspec.Meta(min_length=1, max_length=_MOST_HASHES)]
"""Hashes as the engine publishes them: numbers, or digests in hexadecimal digits."""
_BlockSize = Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_MAX_CHANGE_BYTES = 65_536


class MooncakeQuery(msgspec.Struct, frozen=True):
    """A question to Mooncake's conductor."""

    model: _Text
    token_ids: _TokenIds
    lora_name: _Text | None = None
    tenant_id: _Text = "default"
    instance_id: _Text | None = None
    cache_salt: _Text | None = None


class DynamoQuery(msgspec.Struct, frozen=True):
    """A question to Dynamo's indexer."""

    model: _Text = msgspec.field(name="model_name")
    token_ids: _TokenIds
    lora_name: _Text | None = None
    cache_salt: _Text | None = None


class MooncakeHashQuery(msgspec.Struct, frozen=True):
    """The same, by block hashes."""

    name: ClassVar[str] = "seq_hashes"
    """The field of the hashes."""
    model: _Text
    seq_hashes: _Hashes | None = None
    block_hash: _Hashes | None = None
    """The older name of `seq_hashes`."""
    block_size: _BlockSize = None
    tenant_id: _Text = "default"
    instance_id: _Text | None = None

    @property
    def hashes(self) -> Sequence[int | str] | None:
        return self.seq_hashes or self.block_hash


class DynamoHashQuery(msgspec.Struct, frozen=True):
    """The same, by block hashes."""

    name: ClassVar[str] = "block_hashes"
    model: _Text = msgspec.field(name="model_name")
    hashes: _Hashes = msgspec.field(name="block_hashes")
    block_size: _BlockSize = None


class Registration(msgspec.Struct, frozen=True):
    """A publisher's endpoint; of a replica that is not known yet, with its `url`."""

    instance_id: str | int
    endpoint: _Text | None = None
    replay_endpoint: _Text | None = None
    url: _Text | None = None
    modelname: _Text | None = None
    model_name: _Text | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    additionalsalt: _Text | None = None
    additional_salt: _Text | None = None
    """The newer name of `additionalsalt`."""


_Asked = TypeVar("_Asked", bound=msgspec.Struct)


def add_dialects(
    app: FastAPI, dialects: DialectEndpoints, access: Access, operator: Access
) -> None:
    asking: dict[str, Any] = {"include_in_schema": False, "dependencies": [Depends(access.check)]}

    @app.post("/mooncake/query", **asking)
    async def mooncake_query(request: Request) -> Response:
        asked = await dialects.read(request, MooncakeQuery)
        found = await dialects.look_up(request, asked)
        if asked.instance_id is not None:
            found = {name: each for name, each in found.items() if name == asked.instance_id}
        return json_response(mooncake_answer(found, asked.tenant_id))

    @app.post("/dynamo/query", **asking)
    async def dynamo_query(request: Request) -> Response:
        asked = await dialects.read(request, DynamoQuery)
        return json_response(dynamo_answer(await dialects.look_up(request, asked)))

    @app.post("/mooncake/query_by_hash", **asking)
    async def mooncake_query_by_hash(request: Request) -> Response:
        asked = await dialects.read(request, MooncakeHashQuery)
        found = await dialects.look_up_hashes(request, asked, asked.instance_id)
        return json_response(mooncake_answer(found, asked.tenant_id))

    @app.post("/dynamo/query_by_hash", **asking)
    async def dynamo_query_by_hash(request: Request) -> Response:
        asked = await dialects.read(request, DynamoHashQuery)
        return json_response(dynamo_answer(await dialects.look_up_hashes(request, asked)))

    @app.get("/dynamo/workers", **asking)
    async def workers() -> Response:
        return json_response([_worker(replica) for replica in dialects.router.registry.replicas()])

    _add_changes(app, dialects, operator)


def _add_changes(app: FastAPI, dialects: DialectEndpoints, operator: Access) -> None:
    networks = Networks(dialects.router.config.server.replica_networks)
    changing: dict[str, Any] = {
        "include_in_schema": False,
        "dependencies": [Depends(operator.check)],
    }

    @app.post("/dynamo/register", **{**changing, "status_code": 201})
    @app.post("/mooncake/register", **changing)
    async def register(request: Request) -> Response:
        asked = await dialects.read(request, Registration, _MAX_CHANGE_BYTES)
        _check_namespace(asked)
        if dialects.known(asked.instance_id) is None:
            dialects.router.registry.add(read_replica(_replica_of(asked)), networks.__contains__)
        answer = {"status": "registered successfully", "instance_id": asked.instance_id}
        return json_response(answer, 201 if request.url.path.startswith("/dynamo") else 200)

    @app.post("/dynamo/unregister", **changing)
    @app.post("/mooncake/unregister", **changing)
    async def unregister(request: Request) -> Response:
        asked = await dialects.read(request, Registration, _MAX_CHANGE_BYTES)
        replica = dialects.known(asked.instance_id)
        if replica is None:
            raise UnknownReplica(str(asked.instance_id))
        dialects.router.registry.remove(replica.id)
        removed = [f"{replica.id}|default|{asked.dp_rank}"]
        return json_response({"status": "unregistered successfully", "removed_instances": removed})


@dataclass(slots=True, eq=False)
class DialectEndpoints:
    """The common part of the endpoints."""

    router: RouterParts

    async def read(
        self, request: Request, kind: type[_Asked], most_bytes: int | None = None
    ) -> _Asked:
        with self.router.admission.buffer() as buffer:
            body = await read_request(request, self.router.config.server, buffer.add, most_bytes)
            return await asyncio.to_thread(decode_body, body, kind)

    async def look_up(
        self, request: Request, asked: MooncakeQuery | DynamoQuery
    ) -> dict[str, list[Holding]]:
        """Return how much of a prompt each replica has."""
        key: Key = request.state.key
        model, adapter = self._resolve(key, asked.model)
        salt, of_key = asked.cache_salt, tenant_salt(key, "/route")
        if of_key is not None:
            salt = tenant_salt_of(of_key.secret, salt)
        lora_name = asked.lora_name or adapter
        prompt = await asyncio.to_thread(
            model.index.prepare, asked.token_ids, lora_name, salt, None
        )
        return holdings(model, prompt)

    async def look_up_hashes(
        self,
        request: Request,
        asked: MooncakeHashQuery | DynamoHashQuery,
        instance_id: str | None = None,
    ) -> dict[str, list[Holding]]:
        """Return how much all replicas, or one, have of a prompt that is known by its hashes
        alone."""
        key: Key = request.state.key
        model, _ = self._resolve(key, asked.model)
        if tenant_salt(key, "/route") is not None:
            rule = "a key that keeps its prompts to itself asks /query with token_ids"
            raise BadRequest(f"$.{asked.name}", "hashes", rule)
        hashes = await asyncio.to_thread(_read_hashes, asked.hashes, asked.name)
        found: defaultdict[str, list[Holding]] = defaultdict(list)
        looked_up = 0
        for source in list(model.index.slots):
            if instance_id not in (None, source.replica):
                continue
            held = model.index.match_hashes(source, hashes, asked.block_size)
            exactness: dict[str, Any] = {"exact": held.problem is None}
            if held.problem is not None:
                exactness["problem"] = held.problem
            holding = Holding(source.dp_rank, held.hit, held.groups, exactness)
            found[source.replica].append(holding)
            looked_up += len(hashes)
            if looked_up >= _HASHES_AT_ONCE:
                looked_up = 0
                await asyncio.sleep(0)
        return dict(found)

    def _resolve(self, key: Key, model_name: str) -> tuple[Model, str | None]:
        """The model of a name, and its adapter, if the key may ask about it."""
        if key.usage is not None:
            key.usage.check_model(model_name)
        return self.router.models.resolve(model_name)

    def known(self, instance_id: str | int) -> Replica | None:
        """The replica behind another indexer's name."""
        for replica in self.router.registry.replicas():
            if replica.id == str(instance_id) or worker_number(replica.id) == instance_id:
                return replica
        return None


def _read_hashes(hashes: Sequence[int | str] | None, name: str) -> list[BlockHash]:
    if not hashes:
        raise BadRequest(f"$.{name}", "missing", "must be a list of block hashes")
    return [_read_hash(each, name, index) for index, each in enumerate(hashes)]


def _read_hash(given: int | str, name: str, index: int) -> BlockHash:
    if isinstance(given, int):
        if not -(2**63) <= given < 2**64:
            rule = "must be an integer of 64 bits"
            raise BadRequest(f"$.{name}[{index}]", "a number of more bits", rule)
        return given
    try:
        if len(given) <= _MOST_HASH_DIGITS and given:
            return bytes.fromhex(given)
    except ValueError:
        pass
    rule = f"must be a digest in hexadecimal digits, at most {_MOST_HASH_DIGITS} of them"
    raise BadRequest(f"$.{name}[{index}]", f"{len(given)} characters", rule)


def _check_namespace(asked: Registration) -> None:
    """Refuse a namespace of a replica's own: what serves a model here can take any of its prompts,
    so that it would separate nothing."""
    for name in ("additionalsalt", "additional_salt"):
        if getattr(asked, name):
            rule = "must be empty: give the replicas of another namespace a model name of their own"
            raise BadRequest(f"$.{name}", "a namespace", rule)


def _replica_of(asked: Registration) -> dict[str, Any]:
    if asked.url is None:
        rule = "a replica that is not known yet needs its url: this router looks after its health"
        raise BadRequest("$.url", "missing", rule)
    found: dict[str, Any] = {"id": str(asked.instance_id), "url": asked.url}
    name = asked.modelname or asked.model_name
    if name:
        found["models"] = [name]
    if asked.endpoint:
        events = {"endpoint": asked.endpoint, "dp_rank": asked.dp_rank}
        replay = {"replay_endpoint": asked.replay_endpoint} if asked.replay_endpoint else {}
        found["kv_events"] = [{**events, **replay}]
    return found


def _worker(replica: Replica) -> dict[str, Any]:
    status = "active" if replica.is_healthy else "pending"
    return {
        "instance_id": worker_number(replica.id),
        "replica": replica.id,
        "source": "zmq",
        "status": status,
        "model_name": next(iter(replica.served.models), None),
        "routing_group": "default",
        "endpoints": {str(each.dp_rank): each.endpoint for each in replica.sources},
        "listeners": {
            str(each.dp_rank): {"endpoint": each.endpoint, "status": status}
            for each in replica.sources
        },
    }


# --- answers --------------------------------------------------------------------------------------


class Holding(NamedTuple):
    """Holds the tokens of a prompt that one cache would reuse."""

    dp_rank: int
    hit: Hit
    groups: Sequence[GroupHit]
    exactness: Mapping[str, Any] = {}
    """In an answer that may not be exact: whether it is, and why not."""


def holdings(model: Model, prompt: HashedPrompt) -> dict[str, list[Holding]]:
    """Return the tokens of a prompt that each replica would reuse, by replica and rank, without
    zeros."""
    found: defaultdict[str, list[Holding]] = defaultdict(list)
    for source, hit in model.index.match_prompt(prompt).items():
        if hit.cached_tokens:
            groups = model.index.explain(prompt, source)
            found[source.replica].append(Holding(source.dp_rank, hit, groups))
    return dict(found)


def mooncake_answer(found: Mapping[str, Sequence[Holding]], tenant: str) -> dict[str, Any]:
    """Answer as `POST /query` of a conductor does."""
    names = ("GPU", "DP", "CPU", "DISK")
    return {tenant: {replica: _instance(ranks, *names) for replica, ranks in found.items()}}


def dynamo_answer(found: Mapping[str, Sequence[Holding]]) -> dict[str, Any]:
    """Answer as `POST /query` of an indexer does, which names workers by numbers."""
    named = {str(worker_number(replica)): ranks for replica, ranks in found.items()}
    names = ("gpu", "dp", "cpu", "disk")
    return {
        "scores": {name: _on_gpu(ranks) for name, ranks in named.items()},
        "frequencies": [],
        "instances": {name: _instance(ranks, *names) for name, ranks in named.items()},
    }


def _instance(
    ranks: Sequence[Holding], gpu: str, by_rank: str, cpu: str, disk: str
) -> dict[str, Any]:
    """Show a replica under an indexer's names of its tiers."""
    best = max(ranks, key=lambda each: each.hit.cached_tokens)
    return {
        "longest_matched": best.hit.cached_tokens,
        gpu: max(each.hit.gpu_cached_tokens for each in ranks),
        by_rank: _on_gpu(ranks),
        cpu: max(tokens_with_memory(each.hit) for each in ranks),
        disk: best.hit.cached_tokens,
        "groups": {
            str(each.group): {"kind": each.kind, "tokens": each.tokens} for each in best.groups
        },
        **_exactness(ranks),
    }


def _on_gpu(ranks: Sequence[Holding]) -> dict[str, int]:
    return {str(each.dp_rank): each.hit.gpu_cached_tokens for each in ranks}


def _exactness(ranks: Sequence[Holding]) -> Mapping[str, Any]:
    """Take the first rank's whose answer is not exact, else any."""
    inexact = (each.exactness for each in ranks if not each.exactness.get("exact", True))
    return next(inexact, ranks[0].exactness)
