"""Defines the paths that go to a replica, their methods, and how that replica is chosen."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from router.plane.proxy_types import Dialect
from router.prompt.endpoints import FORMS, PROMPT_ENDPOINTS, Endpoint


class RoutedBy(Enum):
    """Names the way in which a request's replica is chosen."""

    CACHE = "cache"
    """By the prompt's tokens that replicas have cached."""
    LOAD = "load"
    """By load, among the replicas of the model that its body names."""
    ANY = "any"
    """The same, but it need not name a model, and may have any body."""
    RESPONSE = "response"
    """By the stored response that its path names."""


class ProxiedPath(NamedTuple):
    """A path that goes to a replica."""

    routed_by: RoutedBy
    methods: tuple[str, ...] = ("POST",)
    endpoint: Endpoint | None = None
    """The form of the body, where it holds a prompt."""
    response_id: str = ""
    """The id of the response, with `RoutedBy.RESPONSE`."""

    @property
    def label(self) -> str:
        """A name of a fixed set, as metrics need it."""
        return self.endpoint.value if self.endpoint is not None else f"by {self.routed_by.value}"


RENDER_PATHS = tuple(
    f"{endpoint.value}/render" for endpoint, form in FORMS.items() if form.is_rendered
)
"""vLLM's paths that turn a body into one for `/inference/v1/generate`; nothing is computed."""
LOAD_PATHS = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/v1/audio/*",
    *RENDER_PATHS,
)
"""A trailing asterisk matches one character or more."""
ANY_PATHS = ("/version",)
_TOKENIZING = frozenset(("/tokenize", "/detokenize", "/v1/messages/count_tokens", *RENDER_PATHS))
PREPARED = (Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.MESSAGES)
"""The paths of which the core may decide a request, by its numbers."""
EXTRA_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

_RESPONSE = re.compile(
    re.escape(Endpoint.RESPONSES.value)
    + r"/(?P<id>[A-Za-z0-9_.:-]{1,256})(?:/(?P<action>cancel|input_items))?\Z"
)
_RESPONSES = f"{Endpoint.RESPONSES.value}/"
_DOT_SEGMENTS = frozenset((".", ".."))
_RESPONSE_METHODS = {None: ("GET", "DELETE"), "cancel": ("POST",), "input_items": ("GET",)}
_MESSAGES = Endpoint.MESSAGES.value


class ProxiedPaths:
    """Every path that goes to a replica.

    Args:
        extra: The operator's additions to the built-in ones; an asterisk may end a path.
    """

    def __init__(self, extra: Sequence[str]) -> None:
        self._exact: dict[str, ProxiedPath] = {}
        self._prefixes: list[tuple[str, ProxiedPath]] = []
        for path in extra:
            self._add(path, ProxiedPath(RoutedBy.ANY, EXTRA_METHODS))
        for path in ANY_PATHS:
            self._add(path, ProxiedPath(RoutedBy.ANY, ("GET",)))
        for path in LOAD_PATHS:
            self._add(path, ProxiedPath(RoutedBy.LOAD))
        for endpoint in PROMPT_ENDPOINTS:
            self._add(endpoint.value, ProxiedPath(RoutedBy.CACHE, endpoint=endpoint))
        # The longest prefix wins.
        self._prefixes.sort(key=lambda entry: len(entry[0]), reverse=True)

    def find(self, path: str) -> ProxiedPath | None:
        """Return the entry of *path*; None if it does not go to a replica."""
        found = self._exact.get(path)
        if found is None and not _DOT_SEGMENTS.isdisjoint(path.split("/")):
            # Where a server behind it resolves them (RFC 3986 5.2.4), it would be another path.
            return None
        if found is None and (match := _RESPONSE.match(path)):
            methods = _RESPONSE_METHODS[match["action"]]
            return ProxiedPath(RoutedBy.RESPONSE, methods, response_id=match["id"])
        return found or self._extra(path)

    def _extra(self, path: str) -> ProxiedPath | None:
        for prefix, proxied in self._prefixes:
            if path.startswith(prefix) and len(path) > len(prefix):
                if not path.startswith(_RESPONSES):
                    return proxied
                # All that engines offer there is about a stored response.
                response_id = path.removeprefix(_RESPONSES).partition("/")[0]
                return proxied._replace(routed_by=RoutedBy.RESPONSE, response_id=response_id)
        return None

    def _add(self, path: str, proxied: ProxiedPath) -> None:
        if path.endswith("*"):
            self._prefixes.append((path[:-1], proxied))
        else:
            self._exact[path] = proxied


def salt_names(path: str) -> tuple[str, ...]:
    """The fields of a JSON body that engines read a salt from; none where nothing is computed."""
    if path in _TOKENIZING:
        return ()
    # SGLang's own endpoint has another name for it.
    return ("cache_salt", "extra_key") if path == "/generate" else ("cache_salt",)


@functools.lru_cache(maxsize=256)
def dialect_of(path: str) -> Dialect:
    """The form of errors that the clients of a path understand."""
    is_anthropic = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
    return Dialect.ANTHROPIC if is_anthropic else Dialect.OPENAI
