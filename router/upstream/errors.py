"""What can go wrong between the router and one upstream server.

    UpstreamError
    ├── ConnectFailed           no connection: refused, unreachable, unknown name, TLS failure
    │   └── ConnectTimeout      ... or not within connect_s
    ├── ConnectionLimitReached  the client's own bound on connections; says nothing about the server
    │   └── OutOfResources      ... or the system's: no file descriptor, port or buffer left
    ├── ClosedBeforeResponse    the server closed the connection before the first response byte
    │   └── KeptConnectionClosed    ... and it was a kept one: perhaps the request was never seen
    ├── GivenUp                 its caller learned that the server does not respond to others either
    ├── FirstByteTimeout        neither a body byte nor the response's end within first_byte_s
    ├── IdleTimeout             a body that had begun fell silent for idle_s
    ├── ResponseBroken          not HTTP/1.1, over a bound, or cut off before its end
    └── ResponseTooLarge        a fetched body over max_bytes

Messages name the server and the rule. They never quote a request or a response.
"""


class UpstreamError(Exception):
    """The exchange failed.

    Args:
        message: Names the server and the rule.
        received: Whether any byte of a response had arrived.
    """

    def __init__(self, message: str, *, received: bool = False) -> None:
        super().__init__(message)
        self.received = received


class ConnectFailed(UpstreamError):
    """No connection could be made, so the server has not seen the request."""


class ConnectTimeout(ConnectFailed):
    """The connection was not established within `connect_s`."""


class ConnectionLimitReached(UpstreamError):
    """The client holds as many connections as it may, all of them in use."""


class OutOfResources(ConnectionLimitReached):
    """The system gives this process no further socket.

    Args:
        message: Names the server and the rule.
        resource: What there is none of: `open_files`, `ports` or `buffers`.
    """

    def __init__(self, message: str, resource: str) -> None:
        super().__init__(message)
        self.resource = resource


class ClosedBeforeResponse(UpstreamError):
    """The server closed the connection before the first byte of its response."""


class KeptConnectionClosed(ClosedBeforeResponse):
    """The same, on a connection that was kept from an exchange before. Either the server closed it
    as idle and never saw the request, or the request made it close."""


class GivenUp(UpstreamError):
    """`UpstreamClient.give_up` ended the exchange."""


class FirstByteTimeout(UpstreamError):
    """Neither a byte of the body nor the end of the response arrived within `first_byte_s`."""


class IdleTimeout(UpstreamError):
    """The body was silent for longer than `idle_s`."""


class ResponseBroken(UpstreamError):
    """The response is malformed, over a bound, or was cut off before its end."""


class ResponseTooLarge(UpstreamError):
    """The body of a fetch is longer than the caller allows."""
