"""What passes between router and replica."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.server.errors import UnavailableError

if TYPE_CHECKING:
    from starlette.types import Scope

REPLICA_HEADER = b"x-headrace-replica"
"""Header of every answer: which replica it is from."""


class ReplicaLostError(UnavailableError):
    """The replica that had a request has ended (HTTP 503)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedRequest:
    """A request on its way to a replica.

    Attributes:
        method, path, query: As the client sent them.
        headers: Names in lower case, and values.
        client: Address and port, if they are known.
        body: All of it.
        keys: Packed keys of the prompt's prefixes; empty where there is no prompt.
        avoided: Replicas that failed this request already.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    keys: bytes = b""
    avoided: frozenset[str] = frozenset()

    @classmethod
    def of_scope(cls, scope: Scope, body: bytes, keys: bytes) -> ForwardedRequest:
        """Take from an ASGI scope what a replica needs."""
        return cls(
            method=scope["method"], path=scope["path"], query=scope.get("query_string", b""),
            headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            client=tuple(scope["client"]) if scope.get("client") else None, body=body, keys=keys,
        )

    def scope(self) -> dict[str, Any]:
        """The ASGI scope of it, at a replica."""
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1", "scheme": "http", "method": self.method, "path": self.path,
            "raw_path": self.path.encode(), "query_string": self.query, "root_path": "",
            "headers": list(self.headers), "client": self.client, "server": None, "state": {},
        }

    def avoiding(self, name: str) -> ForwardedRequest:
        """The same request, for another replica than this one."""
        return replace(self, avoided=self.avoided | {name})


Message = dict[str, Any]
"""An ASGI message: a plain dictionary of plain values."""

Forward = Callable[[ForwardedRequest], AsyncGenerator[Message, None]]
"""Sends a request to a replica and yields its answer; raises ReplicaLostError if it ends before."""
