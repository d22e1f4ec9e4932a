"""The rows about being the same: equal texts whatever runs beside, equal speed after many chats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tests.benchmarks.peer.bench import Bench
from tests.benchmarks.peer.load import Chat, Load
from tests.benchmarks.peer.prompts import mixed, unshared
from tests.benchmarks.peer.report import Line, RowReport
from tests.benchmarks.peer.servers import Server
from tests.benchmarks.peer.settings import AUTOMATIC, DETERMINISTIC, LAYOUTS

_TENTHS = 10


def equal(bench: Bench) -> RowReport:
    """Each server twice, fresh: once one by one, again, and in a crowd; once in a crowd from cold."""
    sizes, machine = bench.sizes, bench.machine
    chats = unshared("equal", sizes.num_streams, sizes.context, sizes.answer)
    title = (
        f"the same {len(chats)} requests ({sizes.context} + {sizes.answer} tokens) asked one by one, again, "
        "and at once; texts equal to the first answer"
    )
    cells = sizes.num_streams * 1024
    kinds: list[tuple[str, Callable[[], Server]]] = [
        (f"edgerun, {AUTOMATIC}", machine.ours),
        (f"edgerun, {DETERMINISTIC}", partial(machine.ours, DETERMINISTIC)),
    ]
    for peer in (LAYOUTS[0], LAYOUTS[3]):
        kinds.append((f"llama-server `{peer}`", partial(machine.peer, peer, sizes.num_streams, cells)))
    report = RowReport("equal", title, "see the notes", "see the notes")
    for name, make in kinds:
        with make() as server:
            cold = bench.load(server, chats, max_concurrent=1)
            again = bench.load(server, chats, max_concurrent=1)
            crowd = bench.load(server, chats)
        with make() as server:
            cold_crowd = bench.load(server, chats)
            warm_crowd = bench.load(server, chats)
        counts = [
            f"{what} {num_equal(cold, other)}"
            for what, other in (
                ("asked again (cached)", again),
                ("at once (cached)", crowd),
                ("at once (cold, new server)", cold_crowd),
                ("at once again (cached)", warm_crowd),
            )
        ]
        report.notes.append(f"{name}, equal of {len(chats)}: {', '.join(counts)}")
        report.data[name] = [one.text for one in cold.outcomes]
    return report


def num_equal(first: Load, second: Load) -> int:
    """Chats that both loads answered, with the same text."""
    pairs = zip(first.outcomes, second.outcomes, strict=True)
    return sum(a.text == b.text and bool(a.finish_reason) and bool(b.finish_reason) for a, b in pairs)


def endurance(bench: Bench) -> RowReport:
    """Ours alone. Each tenth has chats of the same sizes, half of them 8 at once, half 16 at once."""
    size = bench.sizes.num_tenth
    loads: list[Sequence[Load]] = []
    memory: list[dict[str, int]] = []
    with bench.machine.ours() as server:
        bench.warm_up(server)
        for tenth in range(_TENTHS):
            loads.append(_tenth(bench, server, mixed(f"endurance {tenth}", size)))
            memory.append(server.rss_bytes())
    rates = [
        sum(load.num_completion_tokens for load in tenth) / sum(load.wall_s for load in tenth)
        for tenth in loads
    ]
    errors = [error for tenth in loads for load in tenth for error in load.errors]
    left = sum(one.has_left for tenth in loads for load in tenth for one in load.outcomes)
    title = f"{_TENTHS * size} mixed requests, 8 and 16 at once, {left} whose client leaves"
    report = RowReport("endurance", title, str(AUTOMATIC), "not run")
    report.lines = [
        Line(
            "tokens/s, last tenth against the first",
            "",
            (rates[-1],),
            (rates[0],),
            "the first tenth",
            0.95,
            at_least=True,
        )
    ]
    for process in memory[0]:
        sizes = tuple(one.get(process, 0) / 2**20 for one in memory)
        name = f"resident memory of {process}, last tenth against the second"
        report.lines.append(Line(name, "MiB", (sizes[-1],), (sizes[1],), "the second tenth", 1.05))
        report.notes.append(f"{process}, MiB after each tenth: {', '.join(f'{mib:.0f}' for mib in sizes)}")
    report.notes.append(f"tokens/s of each tenth: {', '.join(f'{rate:.1f}' for rate in rates)}")
    report.notes.append(f"{len(errors)} failed" + (f", the first with: {errors[0]}" if errors else ""))
    return report


def _tenth(bench: Bench, server: Server, chats: Sequence[Chat]) -> list[Load]:
    half = len(chats) // 2
    return [
        bench.load(server, chats[:half], max_concurrent=8),
        bench.load(server, chats[half:], max_concurrent=16),
    ]
