"""Defines the errors between the router and one server that it asks.

Messages name the server and the rule. They never quote a request or a response.
"""


class UpstreamError(Exception):
    """The exchange failed."""


class ConnectFailed(UpstreamError):
    """No connection could be made, so the server has not seen the request: it was refused, the
    server is unreachable, its name is unknown, or TLS failed."""


class ConnectTimeout(ConnectFailed):
    """The connection was not established within `connect_s`."""


class OutOfResources(ConnectFailed):
    """The system gives this process no further socket, which is no fault of the server.

    Args:
        message: Names the server and the rule.
        resource: The one that ran out: `open_files`, `ports`, `buffers` or `memory`.
    """

    def __init__(self, message: str, resource: str) -> None:
        super().__init__(message)
        self.resource = resource


class ClosedBeforeResponse(UpstreamError):
    """The server closed the connection before its response."""


class KeptConnectionClosed(ClosedBeforeResponse):
    """The same, on a connection that was kept from an exchange before. Either the server closed it
    as idle and never saw the request, or the request made it close."""


class FirstByteTimeout(UpstreamError):
    """Neither a byte of the body nor the end of the response arrived within
    `connect_s` and `first_byte_s` together."""


class IdleTimeout(UpstreamError):
    """The body was silent for longer than `idle_s`."""


class ResponseBroken(UpstreamError):
    """The response is not HTTP/1.1, over a bound, or was cut off before its end."""


class ResponseTooLarge(UpstreamError):
    """The body of a fetch is longer than the caller allows."""
