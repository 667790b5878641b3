"""Reads the fields of gateways' questions that are the router's, beside the request asked about."""

from __future__ import annotations

from typing import Any

import msgspec

from router.doors.http.bodies import decode_body
from router.doors.http.request_bodies import ReservationRequest, SelectionRequest
from router.doors.names import names_of, worker_number
from router.fleet.replica import IsEligible, Replica


def _own(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The fields of a question without those that may be long, which are read once, by the
    dispatcher."""
    fields = [
        (field.name, field.type, field.default)
        for field in msgspec.structs.fields(kind)
        if field.name not in ("token_ids", "model", "model_name", "lora_name", "cache_salt")
    ]
    return msgspec.defstruct(f"_Own{kind.__name__}", fields)


OWN_FIELDS = {kind: _own(kind) for kind in (SelectionRequest, ReservationRequest)}


def unrestricted_name(body: bytes) -> str | None:
    """Return the name that a gateway gives its selection or reservation, empty without one; None
    where it says more, such as where its request may go.

    Raises:
        BadRequest: The body is malformed.
    """
    fields: Any = decode_body(body, OWN_FIELDS[SelectionRequest])
    is_restricted = fields.dp_rank is not None or eligible(fields) is not None
    return None if is_restricted else fields.selection_id or ""


def eligible(fields: Any) -> IsEligible | None:
    """Return which replicas a question allows."""
    only = None if fields.replicas is None else frozenset(fields.replicas)
    numbers = None if fields.allowed_worker_ids is None else frozenset(fields.allowed_worker_ids)
    chosen, number = getattr(fields, "replica", None), getattr(fields, "worker_id", None)
    only = only if chosen is None else frozenset((chosen,))
    numbers = numbers if number is None else frozenset((number,))
    avoided = frozenset(fields.avoid or ())
    if only is None and numbers is None and not avoided:
        return None

    def is_eligible(replica: Replica) -> bool:
        names = names_of(replica)
        if only is not None and only.isdisjoint(names):
            return False
        if numbers is not None and worker_number(replica.id) not in numbers:
            return False
        return avoided.isdisjoint(names)

    return is_eligible
