"""Pictures a second through the whole server: file, HTTP, decoding, preprocessing, batcher, model, JSON.

    python -m tests.benchmarks.classify_over_http [--clients 1 2 4] [--seconds 5]

Starts a server of its own. The picture is the shipped 600 x 400 photo; each client sends the next one as soon
as it has its answer (LoadGen's SingleStream for one client).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

import edgerun.cli
from edgerun.server.local import local_server

MODEL = "efficientnet-lite0"
PHOTO = Path(edgerun.cli.__file__).with_name("samples") / "coffee.jpg"


def client(socket: Path, seconds: float) -> list[float]:
    """Latencies in milliseconds of one client."""
    photo = PHOTO.read_bytes()
    latencies = []
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://localhost") as http:
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            answer = http.post("/v1/images/classify", files={"file": ("photo.jpg", photo, "image/jpeg")})
            answer.raise_for_status()
            latencies.append((time.perf_counter() - started) * 1000)
    return latencies


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    with local_server([MODEL]) as socket:
        client(socket, 1)  # warm up
        for count in args.clients:
            with ThreadPoolExecutor(count) as pool:
                futures = [pool.submit(client, socket, args.seconds) for _ in range(count)]
                latencies = [ms for future in futures for ms in future.result()]
            cuts = statistics.quantiles(latencies, n=100)
            sys.stdout.write(
                f"{count} clients: {len(latencies) / args.seconds:.1f} pictures/s, "
                f"p50 {cuts[49]:.1f} ms, p90 {cuts[89]:.1f} ms, p99 {cuts[98]:.1f} ms\n"
            )


if __name__ == "__main__":
    main()
