"""The messages of Envoy's external processing, gRPC's health checks and llm-d's indexer, by their
published names and field numbers; only the fields that are read or written here.

They live in a pool of their own, beside any other package's definitions of the same messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    # Enums are read and written as their numbers, which look the same on the wire.
    "number": _Field.TYPE_INT32,
    "double": _Field.TYPE_DOUBLE,
}
_STRUCTS = "map of Struct"

_CORE, _TYPE, _EXT_PROC, _HEALTH = (
    "envoy.config.core.v3",
    "envoy.type.v3",
    "envoy.service.ext_proc.v3",
    "grpc.health.v1",
)
_INDEXER = "indexer.v1"
_MODE = "envoy.extensions.filters.http.ext_proc.v3"
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    f"{_CORE}.HeaderValue": {
        "key": (1, "string"),
        "value": (2, "string"),
        "raw_value": (3, "bytes"),
    },
    f"{_CORE}.HeaderMap": {"headers": (1, f"*{_CORE}.HeaderValue")},
    f"{_CORE}.HeaderValueOption": {
        "header": (1, f"{_CORE}.HeaderValue"),
        "append_action": (3, "number"),
    },
    f"{_CORE}.Metadata": {"filter_metadata": (1, _STRUCTS)},
    f"{_TYPE}.HttpStatus": {"code": (1, "number")},
    f"{_MODE}.ProcessingMode": {
        "response_header_mode": (2, "number"),
        "response_body_mode": (4, "number"),
    },
    f"{_EXT_PROC}.HttpHeaders": {
        "headers": (1, f"{_CORE}.HeaderMap"),
        "end_of_stream": (3, "bool"),
    },
    f"{_EXT_PROC}.HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    f"{_EXT_PROC}.HttpTrailers": {},
    f"{_EXT_PROC}.ProtocolConfiguration": {
        "request_body_mode": (1, "number"),
        "response_body_mode": (2, "number"),
    },
    f"{_EXT_PROC}.ProcessingRequest": {
        "request_headers": (2, f"{_EXT_PROC}.HttpHeaders"),
        "response_headers": (3, f"{_EXT_PROC}.HttpHeaders"),
        "request_body": (4, f"{_EXT_PROC}.HttpBody"),
        "response_body": (5, f"{_EXT_PROC}.HttpBody"),
        "request_trailers": (6, f"{_EXT_PROC}.HttpTrailers"),
        "response_trailers": (7, f"{_EXT_PROC}.HttpTrailers"),
        "metadata_context": (8, f"{_CORE}.Metadata"),
        "attributes": (9, _STRUCTS),
        "protocol_config": (11, f"{_EXT_PROC}.ProtocolConfiguration"),
    },
    f"{_EXT_PROC}.HeaderMutation": {
        "set_headers": (1, f"*{_CORE}.HeaderValueOption"),
        "remove_headers": (2, "*string"),
    },
    f"{_EXT_PROC}.StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    f"{_EXT_PROC}.BodyMutation": {
        "body": (1, "bytes"),
        "streamed_response": (3, f"{_EXT_PROC}.StreamedBodyResponse"),
    },
    f"{_EXT_PROC}.CommonResponse": {
        "header_mutation": (2, f"{_EXT_PROC}.HeaderMutation"),
        "body_mutation": (3, f"{_EXT_PROC}.BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    f"{_EXT_PROC}.HeadersResponse": {"response": (1, f"{_EXT_PROC}.CommonResponse")},
    f"{_EXT_PROC}.BodyResponse": {"response": (1, f"{_EXT_PROC}.CommonResponse")},
    f"{_EXT_PROC}.TrailersResponse": {},
    f"{_EXT_PROC}.ImmediateResponse": {
        "status": (1, f"{_TYPE}.HttpStatus"),
        "headers": (2, f"{_EXT_PROC}.HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    f"{_EXT_PROC}.ProcessingResponse": {
        "request_headers": (1, f"{_EXT_PROC}.HeadersResponse"),
        "response_headers": (2, f"{_EXT_PROC}.HeadersResponse"),
        "request_body": (3, f"{_EXT_PROC}.BodyResponse"),
        "response_body": (4, f"{_EXT_PROC}.BodyResponse"),
        "request_trailers": (5, f"{_EXT_PROC}.TrailersResponse"),
        "response_trailers": (6, f"{_EXT_PROC}.TrailersResponse"),
        "immediate_response": (7, f"{_EXT_PROC}.ImmediateResponse"),
        "dynamic_metadata": (8, "google.protobuf.Struct"),
        "mode_override": (9, f"{_MODE}.ProcessingMode"),
    },
    f"{_HEALTH}.HealthCheckRequest": {"service": (1, "string")},
    f"{_HEALTH}.HealthCheckResponse": {"status": (1, "number")},
    f"{_INDEXER}.GetPodScoresRequest": {
        "prompt": (1, "string"),
        "model_name": (2, "string"),
        "pod_identifiers": (3, "*string"),
    },
    f"{_INDEXER}.PodScore": {"pod": (1, "string"), "score": (2, "double")},
    f"{_INDEXER}.GetPodScoresResponse": {"scores": (1, f"*{_INDEXER}.PodScore")},
}
"""By message and field: its number, and its type; `*`: any number of them."""


def _package_of(name: str) -> str:
    return name.rpartition(".")[0]


def _file_of(package: str) -> str:
    return f"kvroute/{package}.proto"


def _files() -> Iterator[descriptor_pb2.FileDescriptorProto]:
    before = ["google/protobuf/struct.proto"]
    for package in dict.fromkeys(map(_package_of, _MESSAGES)):
        file = descriptor_pb2.FileDescriptorProto(
            name=_file_of(package), package=package, syntax="proto3", dependency=before
        )
        for name, fields in _MESSAGES.items():
            if _package_of(name) == package:
                _add_message(file.message_type.add(name=name.rpartition(".")[2]), name, fields)
        yield file
        before = [*before, file.name]


def _add_message(message: Any, name: str, fields: Mapping[str, tuple[int, str]]) -> None:
    for field, (number, kind) in fields.items():
        is_many, kind = kind.startswith("*") or kind == _STRUCTS, kind.removeprefix("*")
        added = message.field.add(name=field, number=number)
        added.label = _Field.LABEL_REPEATED if is_many else _Field.LABEL_OPTIONAL
        if kind in _SCALARS:
            added.type = _SCALARS[kind]
            continue
        added.type = _Field.TYPE_MESSAGE
        added.type_name = f".{kind}"
        if kind == _STRUCTS:
            entry = "".join(part.capitalize() for part in field.split("_")) + "Entry"
            added.type_name = f".{name}.{entry}"
            _add_map_entry(message.nested_type.add(name=entry))


def _add_map_entry(entry: Any) -> None:
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
    entry.field.add(
        name="value",
        number=2,
        type=_Field.TYPE_MESSAGE,
        type_name=".google.protobuf.Struct",
        label=_Field.LABEL_OPTIONAL,
    )


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
for _file in _files():
    _pool.Add(_file)


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))


ProcessingRequest: Any = _class(f"{_EXT_PROC}.ProcessingRequest")
ProcessingResponse: Any = _class(f"{_EXT_PROC}.ProcessingResponse")
HealthCheckRequest: Any = _class(f"{_HEALTH}.HealthCheckRequest")
HealthCheckResponse: Any = _class(f"{_HEALTH}.HealthCheckResponse")
GetPodScoresRequest: Any = _class(f"{_INDEXER}.GetPodScoresRequest")
GetPodScoresResponse: Any = _class(f"{_INDEXER}.GetPodScoresResponse")

EXT_PROC_SERVICE = f"{_EXT_PROC}.ExternalProcessor"
HEALTH_SERVICE = f"{_HEALTH}.Health"
INDEXER_SERVICE = f"{_INDEXER}.IndexerService"
