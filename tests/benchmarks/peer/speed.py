"""The rows about time: 16 unshared streams, one stream, and a burst of chats with one system prompt."""

from __future__ import annotations

import statistics

from tests.benchmarks.peer.bench import Bench, PeerRow, line, usage_note, usual_lines
from tests.benchmarks.peer.load import Chat, Load
from tests.benchmarks.peer.prompts import Sizes, question, shared, unshared
from tests.benchmarks.peer.report import RowReport
from tests.benchmarks.peer.settings import AUTOMATIC, MANY_STREAMS, NO_PREFIX_CACHE, ONE_STREAM

_SLOT_CELLS = 1024  # of the peer, for a prompt and an answer of these rows


def cpu(load: Load) -> float:
    return load.cpu_s


def wall(load: Load) -> float:
    return load.wall_s


def unshared16_row(sizes: Sizes) -> PeerRow:
    return PeerRow(
        "unshared16",
        MANY_STREAMS,
        sizes.num_streams,
        sizes.num_streams * _SLOT_CELLS,
        lambda seed: [unshared(seed, sizes.num_streams, sizes.context, sizes.answer)],
        lambda loads: {"CPU s": loads[0].cpu_s, "wall s": loads[0].wall_s},
    )


def unshared16(bench: Bench) -> RowReport:
    sizes, row = bench.sizes, unshared16_row(bench.sizes)
    settings, notes = bench.choose(row)
    peer, ours = (
        [phases[0] for phases in rounds] for rounds in bench.compare(row, settings, [bench.machine.ours()])
    )
    title = f"{sizes.num_streams} streams at once, nothing shared, {sizes.context} + {sizes.answer} tokens"
    report = RowReport(row.name, title, str(AUTOMATIC), row.describe(settings))
    report.lines = [
        line("CPU of the server", "s", cpu, ours, peer, limit=1.05),
        line("wall", "s", wall, ours, peer),
        *usual_lines(ours, peer),
    ]
    report.notes = [*notes, usage_note("edgerun", ours), usage_note("llama-server", peer)]
    return report


def one_row(sizes: Sizes) -> PeerRow:
    return PeerRow(
        "one",
        ONE_STREAM,
        1,
        4096,
        lambda seed: [[Chat("You are a helpful assistant.", question(seed), sizes.one_answer)]],
        lambda loads: {
            "s a token": 1 / loads[0].outcomes[0].tokens_per_s,
            "tokens/s": loads[0].outcomes[0].tokens_per_s,
            "CPU s": loads[0].cpu_s,
        },
    )


def one(bench: Bench) -> RowReport:
    row = one_row(bench.sizes)
    settings, notes = bench.choose(row)
    peer, ours = (
        [phases[0] for phases in rounds] for rounds in bench.compare(row, settings, [bench.machine.ours()])
    )
    report = RowReport(
        row.name, f"one stream of {bench.sizes.one_answer} tokens", str(AUTOMATIC), row.describe(settings)
    )
    report.lines = [
        line(
            "tokens/s, first token to last",
            "",
            lambda load: load.outcomes[0].tokens_per_s,
            ours,
            peer,
            limit=0.98,
            at_least=True,
        ),
        line("CPU of the server", "s", cpu, ours, peer),
        line("TTFT", "s", lambda load: load.ttft_s(0.5), ours, peer),
        line("worst ITL", "ms", lambda load: 1000 * load.itl_s(1), ours, peer),
    ]
    report.notes = [*notes, usage_note("edgerun", ours), usage_note("llama-server", peer)]
    return report


def burst_row(sizes: Sizes) -> PeerRow:
    """Scored by the wall time of both loads together."""

    def cold_then_warm(seed: str) -> list[list[Chat]]:
        chats = shared(seed, sizes.num_streams, sizes.context, sizes.burst_answer)
        return [chats, chats]

    return PeerRow(
        "burst",
        MANY_STREAMS,
        sizes.num_streams,
        sizes.num_streams * _SLOT_CELLS,
        cold_then_warm,
        lambda loads: {
            "both walls s": loads[0].wall_s + loads[1].wall_s,
            "cold wall s": loads[0].wall_s,
            "cold CPU s": loads[0].cpu_s,
            "warm wall s": loads[1].wall_s,
            "warm CPU s": loads[1].cpu_s,
            "warm worst ITL s": loads[1].itl_s(1),
        },
        num_tried=2,
    )


def burst(bench: Bench) -> RowReport:
    sizes, row = bench.sizes, burst_row(bench.sizes)
    settings, notes = bench.choose(row)
    machine = bench.machine
    servers = [machine.ours(), machine.ours(NO_PREFIX_CACHE)]
    all_loads = bench.compare(row, settings, servers)
    (peer, peer_warm), (ours, ours_warm), (bare, _) = (zip(*rounds, strict=True) for rounds in all_loads)
    title = (
        f"{sizes.num_streams} chats at once with one system prompt of {sizes.context} tokens, new each "
        f"round, {sizes.burst_answer} tokens out; then the same again"
    )
    report = RowReport(row.name, title, str(AUTOMATIC), row.describe(settings))
    report.lines = [
        line("cold: wall", "s", wall, ours, peer, limit=0.30),
        line("cold: CPU of the server", "s", cpu, ours, peer, limit=0.30),
        line("cold: TTFT p99", "s", lambda load: load.ttft_s(0.99), ours, peer, limit=0.25),
        line("cold: prompt tokens computed", "", lambda load: load.num_computed_tokens, ours, peer),
        line("cold: wall", "s", wall, ours, bare, limit=0.35, other_name="without prefix cache"),
        line("cold: CPU of the server", "s", cpu, ours, bare, limit=0.35, other_name="without prefix cache"),
        line("warm: wall", "s", wall, ours_warm, peer_warm, limit=1.0),
        line("warm: CPU of the server", "s", cpu, ours_warm, peer_warm, limit=1.0),
        line("warm: worst ITL", "ms", lambda load: 1000 * load.itl_s(1), ours_warm, peer_warm, limit=1.0),
        line("warm: TTFT p99", "s", lambda load: load.ttft_s(0.99), ours_warm, peer_warm),
    ]
    report.notes = [
        *notes,
        usage_note("edgerun, cold", ours),
        usage_note("llama-server, cold", peer),
        usage_note("edgerun, warm", ours_warm),
        usage_note("llama-server, warm", peer_warm),
        _tail_note(ours, sizes.context),
    ]
    return report


def _tail_note(loads: tuple[Load, ...], num_shared: int) -> str:
    """The limit on what is computed: the shared prompt once, and each chat's tail.

    A tail is what the prompt has beyond the shared text; the template's few tokens around it count as tail,
    as does what a block of 16 tokens cannot share.
    """
    load = loads[0]
    tails = load.num_prompt_tokens - len(load.outcomes) * num_shared
    computed = statistics.median(one.num_computed_tokens for one in loads)
    verdict = "met" if computed <= num_shared + tails else "**missed**"
    return (
        f"prompt tokens computed cold: {computed:.0f}, limit {num_shared} + {tails} of the "
        f"{len(load.outcomes)} tails: {verdict}"
    )
