"""Who asks: one name for each client, so that the scheduler can share a model fairly between them.

A name says nothing about a person and lets nobody in: what a request carries is hashed.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct

from fastapi import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_PROCESS = "process:"
_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7)


def client_of(request: Request, user: str | None) -> str:
    """The request's `user` if it names one, else its API key, else the process at the other end of the Unix
    socket, else the address and program that it comes from. Users of different keys are different clients.
    """
    key = str(request.scope.get("edgerun.key", ""))
    if user:
        return f"user:{_short_hash(key, user)}"
    if key:
        return f"key:{key}"
    host = request.client.host if request.client else ""
    if host.startswith(_PROCESS) and request.scope["server"][1] is None:  # over TCP uvicorn believes proxies
        return host
    return f"host:{_short_hash(host, request.headers.get('user-agent', ''))}"


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which names the process at the other end of a Unix socket where TCP has a host."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is None:
            self.client = _peer(transport)


def _peer(transport: asyncio.Transport) -> tuple[str, int] | None:
    """None where the kernel does not say: no Unix socket, or a process outside our pid namespace."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    try:
        pid, _, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except OSError:
        return None
    return (f"{_PROCESS}{pid}", 0) if pid else None


def _short_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
