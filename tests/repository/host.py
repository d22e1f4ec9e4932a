"""A loopback model host with faults, for the tests of downloads."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Host:
    """data: the file. Each fault is a number of requests that it still spoils."""

    data: bytes
    has_ranges: bool = True
    body: bytes | None = None  # sent instead of the file
    content_type: str = "application/octet-stream"
    cuts: int = 0  # close after half of what is left
    errors: int = 0  # answer 500
    status: int = 0  # always answer this
    has_length: bool = True
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)  # (path, Range header)


@contextmanager
def serving(host: Host) -> Iterator[Host]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            host.requests.append((self.path, wanted))
            if host.errors:
                host.errors -= 1
                self.send_error(500)
                return
            if host.status:
                self.send_error(host.status)
                return
            self._send(wanted)

        def _send(self, wanted: str) -> None:
            data, start = host.data if host.body is None else host.body, 0
            if wanted and host.has_ranges:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(data):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            else:
                self.send_response(200)
            self.send_header("Content-Type", host.content_type)
            if host.has_length:
                self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            rest = data[start:]
            if host.cuts:
                host.cuts -= 1
                rest = rest[: len(rest) // 2]
            self.wfile.write(rest)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    host.url = f"http://127.0.0.1:{server.server_address[1]}/m.gguf"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield host
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
