"""edgerun against llama-server: one GGUF file, the same threads, both up, loads in alternation in one run.

    python -m tests.benchmarks.llm_vs_llama_server --peer llama-server --model F.gguf
        [--rows unshared16,one,burst,intruder,overcommit,equal,endurance] [--rounds 3] [--threads N] [--gpu]
        [--peer-settings NAME] [--explore] [--tiny] [--json OUT]

Ours runs in one automatic configuration; for each row the peer is tried with several settings first and then
compared with its best (--peer-settings names them instead; --explore stops after the trying). CPU seconds
are user and system time of the server and its children, from the start of a load to its end. Figures are
medians of the rounds, ratios are made round by round. ITL is the time between two events with text; a
server may put several tokens into one. Every chat has temperature 0 and ignore_eos. Build the peer from the
llama.cpp in the sdist of the pinned llama-cpp-python, so that both run the same kernels.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tests.benchmarks.peer.bench import Bench, PeerRow
from tests.benchmarks.peer.pressure import intruder_row, overcommit, with_intruder
from tests.benchmarks.peer.prompts import Sizes
from tests.benchmarks.peer.report import RowReport
from tests.benchmarks.peer.sameness import endurance, equal
from tests.benchmarks.peer.servers import ServerFailed, ended_by_sigterm
from tests.benchmarks.peer.settings import Machine
from tests.benchmarks.peer.speed import burst, burst_row, one, one_row, unshared16, unshared16_row

ROWS: Mapping[str, Callable[[Bench], RowReport]] = {
    "unshared16": unshared16,
    "one": one,
    "burst": burst,
    "intruder": with_intruder,
    "overcommit": overcommit,
    "equal": equal,
    "endurance": endurance,
}
# The rows for which the peer's settings are chosen.
PEER_ROWS: Mapping[str, Callable[[Sizes], PeerRow]] = {
    "unshared16": unshared16_row,
    "one": one_row,
    "burst": burst_row,
    "intruder": intruder_row,
}


def main() -> None:
    args = _arguments()
    reports: list[RowReport] = []
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="edgerun-bench-") as folder:
        machine = Machine(args.peer.resolve(), args.model.resolve(), args.threads, args.gpu, Path(folder))
        sizes = Sizes.tiny() if args.tiny else Sizes()
        bench = Bench(machine, sizes, args.rounds, args.peer_settings)
        sys.stdout.write(_head(args) + "\n")
        if args.explore:
            _explore(bench, args.rows)
            return
        for name in args.rows:
            bench.say(f"row {name}")
            try:
                report = ROWS[name](bench)
            except ServerFailed as error:  # the other rows are worth having
                report = RowReport(name, "not measured", "", "", notes=[str(error)])
            reports.append(report)
            sys.stdout.write(report.markdown() + "\n")
            sys.stdout.flush()
            if args.json:  # after each row: a run that is stopped keeps what it has
                _write_json(args, reports)


def _explore(bench: Bench, rows: list[str]) -> None:
    for name in rows:
        if name in PEER_ROWS:
            best, notes = bench.choose(PEER_ROWS[name](bench.sizes))
            sys.stdout.write("\n".join([f"## {name}: {best.name}", "", *(f"- {note}" for note in notes), ""]))
            sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, required=True, help="the llama-server to compare with")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--rows", type=_rows, default=list(ROWS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads",
        type=int,
        default=psutil.cpu_count(logical=False) or 1,
        help="default: the physical cores",
    )
    parser.add_argument("--gpu", action="store_true", help="the peer gets -ngl 99; ours decides by itself")
    parser.add_argument("--peer-settings", default="", metavar="NAME", help="where a row knows that name")
    parser.add_argument("--explore", action="store_true", help="only try the peer's settings")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that the script works")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args()


def _rows(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"there is no row {unknown[0]!r}; rows: {', '.join(ROWS)}")
    return names


def _head(args: argparse.Namespace) -> str:
    gpu = ", GPU" if args.gpu else ""
    return (
        f"# {args.model.name}, {args.threads} threads{gpu}, {args.rounds} rounds\n\n"
        f"edgerun at {_commit()}; {_peer_version(args.peer)}; {_processor()}; "
        f"Python {platform.python_version()}\n"
    )


def _write_json(args: argparse.Namespace, reports: list[RowReport]) -> None:
    facts = {
        "model": args.model.name,
        "threads": args.threads,
        "gpu": args.gpu,
        "rounds": args.rounds,
        "commit": _commit(),
        "peer": _peer_version(args.peer),
        "processor": _processor(),
    }
    text = json.dumps({**facts, "rows": [report.as_json() for report in reports]}, indent=1)
    args.json.write_text(text + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown commit"
    return done.stdout.strip() or "unknown commit"


def _peer_version(peer: Path) -> str:
    done = subprocess.run([peer.resolve(), "--version"], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    return next((f"llama-server {line}" for line in lines if line.startswith("version")), "llama-server")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
