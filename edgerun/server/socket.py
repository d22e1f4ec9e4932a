"""Taking the addresses: the Unix socket and the loopback port, before anything slow begins.

Owns who may connect to them: file permissions for the socket, and the rule that any address but loopback
needs an API key. Errors name the address, who has it and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import ipaddress
import json
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from edgerun import paths
from edgerun.errors import ServerStartError

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_CONNECT_TIMEOUT_S = 1.0
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less its closing zero
_SOCKET_UMASK = 0o177  # leaves 0600


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and its address as the ready line names it."""

    socket: socket.socket
    address: str


@contextmanager
def open_listeners(unix: Path, host: str, port: int | None) -> Iterator[list[Listener]]:
    """Listen on the Unix socket and, unless port is None, on TCP (0: any free port).

    Raises ServerStartError. On leaving, all are closed and the socket's file is removed if it is still ours.
    """
    with contextlib.ExitStack() as stack:
        listeners = [Listener(stack.enter_context(_unix_listener(unix)), f"unix:{unix}")]
        if port is not None:
            tcp = stack.enter_context(bind_tcp(host, port))
            listeners.append(Listener(tcp, f"http://{_in_url(host)}:{tcp.getsockname()[1]}"))
        yield listeners


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ---- the Unix socket


@contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    with bind_unix(path) as listener:
        ours = _identity(path)
        try:
            yield listener
        finally:
            if _identity(path) == ours:
                path.unlink(missing_ok=True)


def bind_unix(path: Path) -> socket.socket:
    """A listening socket at `path`, mode 0600, its folder 0700 if it had to be made.

    A dead socket (nobody accepts) is replaced, a live one never. Raises ServerStartError.
    """
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ServerStartError(
            f"the socket path {path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes; "
            "choose a shorter one with --socket"
        )
    _prepare_folder(path)
    _remove_dead(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(_SOCKET_UMASK)  # of the whole process, but nothing else runs yet
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ServerStartError(f"cannot make the socket {path}: {error.strerror}; see --socket") from error
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def _prepare_folder(path: Path) -> None:
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat(follow_symlinks=False)
    except OSError as error:
        raise ServerStartError(f"cannot use the socket's folder {folder}: {error.strerror}") from error
    is_default = path == paths.socket_path()
    if is_default and (found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022):
        # In /tmp anybody may have made it first, to stand between us and our clients.
        raise ServerStartError(
            f"{folder} does not belong to this user alone; remove it, or set XDG_RUNTIME_DIR or --socket"
        )


def _remove_dead(path: Path) -> None:
    """Make room at `path`. Raises ServerStartError if something that lives, or is no socket, is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ServerStartError(f"{path} exists and is not a socket; move it or choose another with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            logger.info("replacing the socket %s of a server that is gone", path)
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # busy or not ours: it lives, as far as we can tell
    raise ServerStartError(
        f"a server is running on {path} already; use it, stop it, or choose another socket with --socket"
    )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# ---- TCP


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ServerStartError naming the address and, where known, who has it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ServerStartError(f"{host!r} is no address of this machine ({error}); see --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ServerStartError(_why_not(error, host, port)) from error
    return listener


def _why_not(error: OSError, host: str, port: int) -> str:
    where = f"{_in_url(host)}:{port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use by {_owner(host, port)}; stop that, "
            "or take another port with --port N (0: any free one)"
        )
    if error.errno == errno.EACCES:
        return f"listening on {where} is not allowed to this user; take a port above 1023 with --port N"
    return f"cannot listen on {where}: {error.strerror}; see --host and --port"


def _owner(host: str, port: int) -> str:
    """Who has the port, in words, as far as that can be found out."""
    if _is_edgerun(host, port):
        return "an edgerun server that is already running (it can be used as it is)"
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_listener = connection.status == psutil.CONN_LISTEN and connection.pid is not None
            if is_listener and connection.laddr and connection.laddr.port == port:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another program"


def _is_edgerun(host: str, port: int) -> bool:
    target = "127.0.0.1" if host in ("", "0.0.0.0", "localhost") else host
    connection = http.client.HTTPConnection(target, port, timeout=_CONNECT_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        body = json.loads(connection.getresponse().read(4096))
        return isinstance(body, dict) and body.get("server") == "edgerun"
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
