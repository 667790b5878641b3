"""The router options of a deployment. Checked where the application is built: what the process of a
handle finds wrong later it can only log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RoutingOptions:
    """`request_router_kwargs` of a deployment.

    Raises:
        ValueError: Name, value and rule of the first that is wrong.
    """

    url: str
    """The router's."""
    model: str | None = None
    """Asked for in place of the one in the request; needed where requests name none and the router
    serves several."""
    endpoint: str | None = None
    """The API whose form prompts have, where they do not show it: `/v1/messages`,
    `/v1/embeddings`."""
    api_key_env: str | None = None
    """The environment variable with the client's key, in the processes that hold handles: the key
    itself would show in Ray's status."""
    timeout_s: float = 5.0
    """The longest wait for an answer; then Ray chooses. It is longer than a request may wait for
    its turn at the router."""
    pause_s: float = 1.0
    """A router that gave no answer is asked nothing for so long."""
    booking_argument: str | None = None
    """The keyword argument by which the called method gets what is booked, a
    `router.client.Selection`, so that the replica can report; None where the router was not
    asked."""

    def __post_init__(self) -> None:
        check_url("url", self.url)
        for name in ("timeout_s", "pause_s"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 < value <= 3600:
                raise ValueError(f"{name}: {value!r} must be a number over 0, up to 3600")
        argument = self.booking_argument
        if argument is not None and not argument.isidentifier():
            raise ValueError(f"booking_argument: {argument!r} must be the name of an argument")

    def api_key(self) -> str | None:
        """Return the client's key, where there is one.

        Raises:
            ValueError: The variable is not set.
        """
        return key_of(self.api_key_env)


def router_kwargs(url: str, **options: Any) -> dict[str, Any]:
    """Return `request_router_kwargs` for a deployment; the options are those of `RoutingOptions`.

    Raises:
        ValueError: One of them is wrong.
        TypeError: There is none of that name.
    """
    return asdict(RoutingOptions(url, **options))


def check_url(name: str, url: str) -> None:
    """Raise ValueError unless it is the address of a server, without user, path or query.

    Args:
        name: Of the option.
        url: Its value.
    """
    rule = f"{name}: {url!r} must be http://HOST:PORT or https://HOST:PORT"
    try:
        address = urlsplit(url)
        _ = address.port
    except (ValueError, AttributeError):
        raise ValueError(rule) from None
    has_more = address.path.strip("/") or address.query or address.fragment or "@" in address.netloc
    if address.scheme not in ("http", "https") or not address.hostname or has_more:
        raise ValueError(rule)


def key_of(variable: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the key in an environment variable; None where none is named.

    Raises:
        ValueError: It is named and not set.
    """
    if variable is None:
        return None
    key = environ.get(variable)
    if not key:
        raise ValueError(f"environment: {variable} must be set, it is named as a router's key")
    return key
