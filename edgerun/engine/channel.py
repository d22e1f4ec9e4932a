"""Messages over a Unix socketpair: a 4-byte big-endian length, then msgpack.

Two ends of one wire: threads with a blocking socket in the engine, asyncio in the server. Neither knows what
the messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from typing import Final

import msgspec

from edgerun.engine.messages import FromEngine, Message, ToEngine

logger = logging.getLogger(__name__)

_MAX_FRAME_BYTES: Final = 256 * 2**20  # beyond this the stream is broken, not large
_LENGTH_BYTES: Final = 4


def _length(header: bytes) -> int:
    length = int.from_bytes(header, "big")
    if length > _MAX_FRAME_BYTES:
        raise ConnectionError(f"a message of {length} bytes: the channel is out of step")
    return length


class EngineChannel:
    """The engine's end. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = sock.makefile("rb")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Blocks while the server does not read; it reads always. Raises OSError when it is gone."""
        data = self._encoder.encode(message)
        with self._lock:
            self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def receive(self) -> ToEngine | None:
        """The next message; None when the server has closed its end."""
        try:
            header = self._reader.read(_LENGTH_BYTES)
        except ConnectionResetError:  # it is gone and has left messages of ours unread
            return None
        if len(header) < _LENGTH_BYTES:
            return None
        length = _length(header)
        data = self._reader.read(length)
        return self._decoder.decode(data) if len(data) == length else None


class ServerChannel:
    """The server's end, on the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    async def over(cls, sock: socket.socket) -> ServerChannel:
        return cls(*await asyncio.open_unix_connection(sock=sock))

    def send(self, message: Message) -> None:
        """Never blocks: what the engine has not read yet is kept in memory. Ignored once it is closed."""
        if not self._writer.is_closing():
            data = self._encoder.encode(message)
            self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self) -> FromEngine | None:
        """The next message; None when the engine is gone, or sends what cannot be read."""
        try:
            header = await self._reader.readexactly(_LENGTH_BYTES)
            return self._decoder.decode(await self._reader.readexactly(_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except msgspec.MsgspecError:
            logger.exception("the engine sent a message that cannot be read")
            return None

    def hang_up(self) -> None:
        """At once: `receive` says None, and what the engine has not read yet is dropped."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self.hang_up()
        with contextlib.suppress(ConnectionError):  # the engine may be gone already
            await self._writer.wait_closed()
