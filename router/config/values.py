"""Defines the rules of single values of the configuration: bounds and forbidden content.

Environment variables can stand for API keys only. A URL from the environment would end up in logs
and responses; a key never does.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SecretStr,
    ValidationInfo,
)

from kvevents.codec import MAX_GROUP_IDX
from kvevents.curve import PUBLIC_KEY_CHARS, parse_public_key
from kvevents.endpoints import ZmqEndpoint
from kvevents.errors import CurveError, EndpointError
from kvevents.listener import LISTENED_TO
from router.config.origin import Origin, OriginError, in_url
from router.config.section import broken_rule

MASK = "***"
WILDCARD_HOSTS = frozenset(("*", "0.0.0.0", "[::]", "::", "[*]"))
"""Hosts that a server can bind to but no client can connect to."""
POLLED = ("http://", "https://")
"""Prefixes of the address of a source that is polled for its events."""
# Less than `ZmqEndpoint` takes: white space is a mistake, and so is a port that is left to ZMQ.
_ENDPOINT = re.compile(r"(tcp://[^\s/]+:\d{1,5}|ipc://\S+|inproc://\S+)\Z")
_PROXIED_PATH = re.compile(
    r"/(?:[A-Za-z0-9._~!$&'()+,;=:@-]+/)*(?:[A-Za-z0-9._~!$&'()+,;=:@-]+|\*)\Z"
)
_OWN_PATHS = (
    *("/healthz", "/readyz", "/health", "/ping", "/metrics", "/route", "/v1/models"),
    *("/replicas", "/overview", "/requests", "/config", "/openapi.json", "/docs", "/redoc"),
    *("/static", "/history", "/snapshot"),
)
_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_FILE = "file:"
_MAX_KEY_FILE_BYTES = 8192
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# What a header's value may hold without quoting: visible ASCII (RFC 9110 5.5).
_KEY = re.compile(r"[\x21-\x7e]{1,4096}\Z")

T = TypeVar("T")


def _refuse_reference(data: object) -> object:
    if isinstance(data, str) and _REFERENCE.search(data):
        raise broken_rule("holds a ${...}; environment variables are for API keys only")
    return data


def _as_tuple(data: object) -> object:
    return tuple(data) if isinstance(data, list) else data


def _drafter_groups(data: object) -> object:
    if isinstance(data, bool):
        return data
    numbers = data if isinstance(data, (list, tuple)) else [data]
    wrong = (each for each in numbers if type(each) is not int or not 0 <= each <= MAX_GROUP_IDX)
    if numbers is not data or next(wrong, None) is not None:
        raise broken_rule(
            f"{data!r:.100}; must be true, false, or a list of groups, numbers from 0 to "
            f"{MAX_GROUP_IDX}"
        )
    return tuple(numbers)


def _resolve_key(data: object, info: ValidationInfo) -> object:
    """Return a key, or the value of the variable that `${NAME}` names.

    No message repeats the data: the name of a variable may be the key itself.
    """
    if isinstance(data, SecretStr):
        return data
    if not isinstance(data, str):
        raise broken_rule(
            f"not shown ({type(data).__name__}); expected a key or ${{NAME}} in quotes"
        )
    reference = _REFERENCE.fullmatch(data)
    value = data if reference is None else _referred_to(reference[1], info.context)
    if not _KEY.match(value) or (reference is None and _REFERENCE.search(value)):
        raise broken_rule(
            "not shown; a key is 1 to 4096 visible ASCII characters,"
            " or ${NAME} and nothing around it"
        )
    return value


def _referred_to(reference: str, context: Mapping[str, Any] | None) -> str:
    if context is None:
        raise broken_rule(
            "a ${...}; environment variables can be named in the configuration file only"
        )
    if reference.startswith(_FILE):
        return _content(reference.removeprefix(_FILE), context["directory"])
    return _variable(reference, context)


def _content(name: str, directory: Path | None) -> str:
    """Return the first line of a file, as secrets are mounted."""
    try:
        with (directory or Path()).joinpath(name).open("rb") as file:
            content = file.read(_MAX_KEY_FILE_BYTES).decode("ascii", "replace")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "is no path"
        raise broken_rule(f"${{{_FILE}{name[:200]}}}; cannot be read: {why}") from None
    return content.rstrip("\r\n")


def _variable(name: str, context: Mapping[str, Mapping[str, str]]) -> str:
    if not _VARIABLE.match(name):
        raise broken_rule("not shown; ${...} must hold the name of an environment variable")
    value = context["environ"].get(name)
    if not value:
        raise broken_rule(f"${{{name[:100]}}}; this environment variable is not set, or empty")
    return value


def placed(path: str, info: ValidationInfo) -> str:
    """Return a path as the process finds it: relative ones start at the configuration's own
    directory."""
    directory = (info.context or {}).get("directory")
    return path if directory is None else str(directory / path)


def _check_url(url: str) -> str:
    try:
        Origin.parse(url)
    except OriginError as error:
        raise broken_rule(str(error).removeprefix("url: ")) from None
    return url


def _check_public_key(text: str) -> str:
    try:
        parse_public_key(text)
    except CurveError as error:
        raise broken_rule(str(error)) from None
    return text


def _refuse_reference_for_key(data: object) -> object:
    """Refuse a reference, except in a public key: one in a few hundred looks as if it held one."""
    is_key = isinstance(data, str) and len(data) == PUBLIC_KEY_CHARS
    return data if is_key else _refuse_reference(data)


def _check_network(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise broken_rule(f"{text!r}; expected a network as 10.0.0.0/8") from None
    return text


def _check_peer_host(host: str) -> str:
    """Return an IPv6 address without brackets, which engines put around it where they need them."""
    if ":" not in host:
        return host
    address = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        raise broken_rule(f"{host!r}; expected a name or an address, without port") from None
    return address


def _check_endpoint(endpoint: str) -> str:
    if not is_endpoint(endpoint):
        raise broken_rule(f"{endpoint!r}; expected tcp://host:port or ipc://path")
    return endpoint


def _check_event_address(endpoint: str) -> str:
    if endpoint.startswith(POLLED):
        return _check_polled(endpoint)
    if endpoint != LISTENED_TO and not is_endpoint(endpoint):
        raise broken_rule(
            f"{endpoint!r}; expected tcp://host:port, ipc://path, http://host:port/path or "
            f"{LISTENED_TO}"
        )
    return endpoint


def _check_polled(endpoint: str) -> str:
    try:
        origin = Origin.parse(reachable(endpoint, "replica"), "it")
    except OriginError as error:
        raise broken_rule(str(error)) from None
    if not origin.base_path:
        raise broken_rule(f"{endpoint!r}; expected a path, such as /kv_cache_events")
    return endpoint


def _check_proxied_path(path: str) -> str:
    if not _PROXIED_PATH.match(path):
        raise broken_rule(
            f"{path!r}; expected a path like /pooling, or /v2/* for all that begins with /v2/"
        )
    for own in _OWN_PATHS:
        prefix = path.removesuffix("*")
        if path == own or path.startswith(f"{own}/") or (prefix != path and own.startswith(prefix)):
            raise broken_rule(f"{path!r}; the router itself answers {own}")
    return path


def is_endpoint(text: str) -> bool:
    """Return whether *text* is a ZMQ address; wildcards included."""
    try:
        ZmqEndpoint.parse("", text)
    except EndpointError:
        return False
    return bool(_ENDPOINT.match(text)) and len(text) <= 1024


def reachable(endpoint: str, host: str) -> str:
    """Return the address to connect to, for one that a server binds to.

    Args:
        endpoint: Such as `tcp://*:5557`.
        host: Replaces the wildcard, if there is one.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "http", "https"):
        return endpoint
    place, slash, path = rest.partition("/")
    bound, colon, port = place.rpartition(":") if ":" in place else (place, "", "")
    if bound not in WILDCARD_HOSTS:
        return endpoint
    return f"{scheme}://{in_url(host)}{colon}{port}{slash}{path}"


def has_wildcard_host(endpoint: str) -> bool:
    """Return whether an address takes the host that it is reached at from elsewhere."""
    return reachable(endpoint, "replica") != endpoint


def is_local_host(host: str) -> bool:
    """Return whether a name or address is this machine's own, in any of the forms that resolvers
    take: `127.1` and `0` too. A name that merely resolves to such an address is not known here."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(name))
        except OSError:
            return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified


def is_local_endpoint(endpoint: str) -> bool:
    """Return whether a source's address leads to this machine itself; wildcards, which stand for
    another host, do not."""
    if not endpoint.startswith("tcp://"):
        return True
    # ZMQ takes a source address before a semicolon.
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].rpartition(";")[2]
    return host not in WILDCARD_HOSTS and is_local_host(host)


PLAIN = BeforeValidator(_refuse_reference)
"""Marks a value that is not a key."""
Items = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
"""A list; kept as a tuple, since models are frozen."""
Secret = Annotated[
    SecretStr,
    BeforeValidator(_resolve_key),
    PlainSerializer(lambda _key: MASK, return_type=str),
]
"""An API key: itself, `${NAME}` of the environment, or `${file:PATH}`. It prints as asterisks;
`get_secret_value` reveals it."""

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False), PLAIN]
Count = Annotated[int, Field(ge=1, le=1_000_000), PLAIN]
Bytes = Annotated[int, Field(ge=1024, le=2**40), PLAIN]
Tokens = Annotated[int, Field(ge=1, le=2**20), PLAIN]
DrafterGroups = Annotated[bool | tuple[int, ...], BeforeValidator(_drafter_groups)]
"""True: all groups."""
TokenCount = Annotated[int, Field(ge=1, le=2**40), PLAIN]
Port = Annotated[int, Field(ge=0, le=65_535), PLAIN]
Window = Annotated[int, Field(ge=1, le=2**31), PLAIN]
Checks = Annotated[int, Field(ge=1, le=1000), PLAIN]
Name = Annotated[str, Field(min_length=1, max_length=256), PLAIN]
FilePath = Annotated[str, Field(min_length=1, max_length=4096), PLAIN]
PlacedPath = Annotated[FilePath, AfterValidator(placed)]
"""The path of a file; relative to the configuration's own."""
UrlPath = Annotated[str, Field(pattern=r"^/[!-~]{0,255}$"), PLAIN]
ProxiedPathPattern = Annotated[
    str, Field(max_length=256), PLAIN, AfterValidator(_check_proxied_path)
]
Url = Annotated[str, Field(max_length=2048), PLAIN, AfterValidator(_check_url)]
ZmqAddress = Annotated[str, Field(max_length=1024), PLAIN, AfterValidator(_check_endpoint)]
EventAddress = Annotated[str, Field(max_length=1024), PLAIN, AfterValidator(_check_event_address)]
Network = Annotated[str, Field(max_length=64), PLAIN, AfterValidator(_check_network)]
HostName = Annotated[str, Field(pattern=r"^([A-Za-z0-9_.-]{1,253}|\*)$"), PLAIN]
PeerHost = Annotated[
    str,
    Field(pattern=r"^([A-Za-z0-9_.-]{1,253}|\*|[0-9A-Fa-f:.]{2,45}|\[[0-9A-Fa-f:.]{2,45}\])$"),
    PLAIN,
    AfterValidator(_check_peer_host),
]
CurvePublicKey = Annotated[
    str,
    Field(max_length=64),
    BeforeValidator(_refuse_reference_for_key),
    AfterValidator(_check_public_key),
]
KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$"), PLAIN]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9!#$%&'*+.^_`|~-]{1,64}$"), PLAIN]
ReplicaId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$"), PLAIN]
"""Appears in headers, in metrics and in the path of a URL."""
