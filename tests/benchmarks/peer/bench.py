"""One run of rows: loads in alternation, the choice of the peer's settings, the figures that rows share."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.benchmarks.peer.load import Chat, Load, quantile, run_chats
from tests.benchmarks.peer.prompts import Sizes, unshared
from tests.benchmarks.peer.report import Line
from tests.benchmarks.peer.servers import Server
from tests.benchmarks.peer.settings import Machine, PeerSettings, named

Phases = Callable[[str], Sequence[Sequence[Chat]]]  # seed -> the loads of one round, one after the other
Score = Callable[[Sequence[Load]], dict[str, float]]  # the loads tried -> figures, the deciding one first


@dataclass(frozen=True, slots=True)
class PeerRow:
    """What the peer needs for a row. score: the lower its first figure, the better.

    num_tried: with how many of a round's loads the peer's settings are chosen.
    """

    name: str
    choices: tuple[PeerSettings, ...]
    num_slots: int
    num_cells: int
    phases: Phases
    score: Score
    num_tried: int = 1

    def describe(self, settings: PeerSettings) -> str:
        return f"-np {self.num_slots} -c {self.num_cells} {settings}"


@dataclass(slots=True)
class Bench:
    """One run on one machine. peer_settings: a name, for the rows that know it; "": as measured."""

    machine: Machine
    sizes: Sizes
    num_rounds: int
    peer_settings: str = ""
    started_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self.started_s:6.0f} s] {text}\n")
        sys.stderr.flush()

    def load(self, server: Server, chats: Sequence[Chat], max_concurrent: int = 0) -> Load:
        """Run chats against server and read its CPU time before and after."""
        before_s, start_s = server.cpu_s(), time.perf_counter()
        outcomes = run_chats(server.url, server.model, chats, max_concurrent)
        load = Load(outcomes, time.perf_counter() - start_s, server.cpu_s() - before_s)
        self.say(
            f"{server.name}: {len(load.finished)} of {len(chats)} finished, wall {load.wall_s:.2f} s, "
            f"CPU {load.cpu_s:.2f} s, {load.tokens_per_s:.1f} tokens/s"
            + (f", first error: {load.errors[0]}" if load.errors else "")
        )
        return load

    def warm_up(self, server: Server) -> None:
        """Not measured: threads, pages and the measured rates of a server settle."""
        run_chats(server.url, server.model, unshared("warm up", 4, 100, 8))

    def alternate(self, servers: Sequence[Server], phases: Phases, seed: str) -> list[list[list[Load]]]:
        """[server][round][phase]: in each round every server in turn gets the round's loads."""
        for server in servers:
            self.warm_up(server)
        loads: list[list[list[Load]]] = [[] for _ in servers]
        for number in range(self.num_rounds):
            for server, rounds in zip(servers, loads, strict=True):
                rounds.append([self.load(server, chats) for chats in phases(f"{seed} {number}")])
        return loads

    def choose(self, row: PeerRow) -> tuple[PeerSettings, list[str]]:
        """The peer's best settings for a row and, when they were measured now, a note for each tried."""
        if (given := named(row.choices, self.peer_settings)) is not None:
            return given, []
        scores: list[tuple[float, PeerSettings]] = []
        notes = []
        for settings in row.choices:
            self.say(f"{row.name}: trying the peer with {settings}")
            with self.machine.peer(settings, row.num_slots, row.num_cells) as server:
                self.warm_up(server)
                tried = row.phases(f"choose {row.name}")[: row.num_tried]
                loads = [self.load(server, chats) for chats in tried]
            figures = row.score(loads)
            failed = sum(len(load.errors) for load in loads)
            shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
            notes.append(f"peer tried with `{settings}` ({settings.name}): {shown}, {failed} failed")
            first = next(iter(figures.values()))
            scores.append((math.inf if failed or math.isnan(first) else first, settings))
        return min(scores, key=lambda pair: pair[0])[1], notes

    def compare(self, row: PeerRow, settings: PeerSettings, ours: Sequence[Server]) -> list[list[list[Load]]]:
        """[server][round][phase] of the peer and then each of `ours`, all of them up."""
        with ExitStack() as stack:
            peer = stack.enter_context(self.machine.peer(settings, row.num_slots, row.num_cells))
            servers = [peer, *(stack.enter_context(one) for one in ours)]
            return self.alternate(servers, row.phases, row.name)


def line(
    what: str,
    unit: str,
    figure: Callable[[Load], float],
    ours: Sequence[Load],
    other: Sequence[Load],
    *,
    limit: float | None = None,
    at_least: bool = False,
    other_name: str = "llama-server",
) -> Line:
    """figure of both sides, round by round."""
    mine, others = tuple(map(figure, ours)), tuple(map(figure, other))
    return Line(what, unit, mine, others, other_name, limit, at_least)


def usual_lines(ours: Sequence[Load], peer: Sequence[Load], what: str = "") -> list[Line]:
    """Time to first token, time between events and tokens/s, without limits."""
    return [
        line(f"{what}TTFT p50", "s", lambda load: load.ttft_s(0.5), ours, peer),
        line(f"{what}TTFT p99", "s", lambda load: load.ttft_s(0.99), ours, peer),
        line(f"{what}ITL p50", "ms", lambda load: 1000 * load.itl_s(0.5), ours, peer),
        line(f"{what}ITL p99", "ms", lambda load: 1000 * load.itl_s(0.99), ours, peer),
        line(f"{what}worst ITL", "ms", lambda load: 1000 * load.itl_s(1), ours, peer),
        line(f"{what}tokens/s", "", lambda load: load.tokens_per_s, ours, peer),
    ]


def usage_note(name: str, loads: Sequence[Load]) -> str:
    """Whether both sides did the same work."""
    prompt = [load.num_prompt_tokens for load in loads]
    computed = [load.num_computed_tokens for load in loads]
    answers = [load.num_completion_tokens for load in loads]
    failed = sum(len(load.errors) for load in loads)
    events = quantile((len(one.events_s) for load in loads for one in load.outcomes), 0.5)
    return (
        f"{name}, by `usage` (medians of a load): {statistics.median(prompt):.0f} prompt tokens, of which "
        f"{statistics.median(computed):.0f} computed, {statistics.median(answers):.0f} tokens of answers "
        f"(in {events:.0f} events each); {failed} failed"
    )
