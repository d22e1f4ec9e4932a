"""The rows about pressure: a long prompt among running streams, and more chats than the KV pool can hold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.benchmarks.peer.bench import Bench, PeerRow, line, usage_note
from tests.benchmarks.peer.load import Chat, Load, Outcome, quantile
from tests.benchmarks.peer.prompts import INTRUDER, Sizes, intruder, unshared, watching
from tests.benchmarks.peer.report import Line, RowReport
from tests.benchmarks.peer.settings import AUTOMATIC, LONG_PROMPT, OurSettings, PeerSettings

_INTRUDER_CELLS = 4608  # of each slot of the peer: the long prompt, its answer, and some
_TARGET_MS = 100.0  # inter_token_target_ms, as it is unless set


def intruder_row(sizes: Sizes) -> PeerRow:
    """Scored by the worst wait, which is what the row is about; its TTFT is shown beside it."""
    count = sizes.num_watching

    def loads_of(seed: str) -> list[list[Chat]]:
        """With the intruder, once for each length of the answers, and then alone."""
        alone = watching(f"{seed} alone", count, sizes.watching_answers[-1])
        mixed = [
            [*watching(f"{seed} {answer}", count, answer), intruder(f"{seed} {answer}", sizes.intruder)]
            for answer in sizes.watching_answers
        ]
        return [*mixed, alone]

    return PeerRow(
        "intruder",
        LONG_PROMPT,
        count + 1,
        (count + 1) * _INTRUDER_CELLS,
        loads_of,
        lambda loads: {
            "worst ITL s": loads[0].itl_s(1),
            "intruder TTFT s": _intruder(loads[0]).ttft_s,
            "wall s": loads[0].wall_s,
            "CPU s": loads[0].cpu_s,
        },
    )


def with_intruder(bench: Bench) -> RowReport:
    sizes, row = bench.sizes, intruder_row(bench.sizes)
    settings, notes = bench.choose(row)
    both = bench.compare(row, settings, [bench.machine.ours()])
    peer, ours = ([list(phase) for phase in zip(*rounds, strict=True)] for rounds in both)
    title = f"{sizes.num_watching} streams, after 1.5 s a prompt of {sizes.intruder} tokens"
    report = RowReport(row.name, title, str(AUTOMATIC), row.describe(settings))
    lone_p50_ms = 1000 * statistics.median(load.itl_s(0.5) for load in ours[-1])
    report.lines = [line("alone: ITL p50", "ms", lambda load: 1000 * load.itl_s(0.5), ours[-1], peer[-1])]
    for i, answer in enumerate(sizes.watching_answers):
        report.lines += _intruder_lines(f"{answer} out: ", ours[i], peer[i], max(_TARGET_MS, 3 * lone_p50_ms))
        notes.append(f"edgerun, {answer} out: {_overlap(ours[i])}; llama-server: {_overlap(peer[i])}")
    notes += [usage_note("edgerun", ours[0]), usage_note("llama-server", peer[0])]
    report.notes = notes
    return report


def _intruder_lines(what: str, ours: Sequence[Load], peer: Sequence[Load], limit_ms: float) -> list[Line]:
    def worst_ms(load: Load) -> float:
        return 1000 * load.itl_s(1)

    return [
        line(f"{what}worst ITL of the streams", "ms", worst_ms, ours, peer, limit=0.25),
        Line(f"{what}worst ITL of the streams", "ms", tuple(map(worst_ms, ours)), limit=limit_ms),
        line(f"{what}ITL p99 of the streams", "ms", lambda load: 1000 * load.itl_s(0.99), ours, peer),
        line(f"{what}TTFT of the intruder", "s", lambda load: _intruder(load).ttft_s, ours, peer, limit=1.3),
        line(f"{what}wall", "s", lambda load: load.wall_s, ours, peer),
        line(f"{what}CPU of the server", "s", lambda load: load.cpu_s, ours, peer),
    ]


def _intruder(load: Load) -> Outcome:
    return load.tagged(INTRUDER)[0]


def _overlap(loads: Sequence[Load]) -> str:
    """How many streams still ran when the intruder's first token came: all, or the row says little."""
    running = []
    for load in loads:
        first_s = _intruder(load).events_s[:1]
        running.append(sum(one.ended_s > first_s[0] for one in load.tagged("")) if first_s else 0)
    streams = len(loads[0].tagged(""))
    return f"{min(running)} of {streams} streams still ran when the intruder's first token came"


def overcommit(bench: Bench) -> RowReport:
    sizes, machine = bench.sizes, bench.machine
    chats = unshared("overcommit", sizes.num_crowded, sizes.crowded_prompt, sizes.crowded_answer)
    room = sizes.crowded_prompt + sizes.crowded_answer
    llm = {
        "num_kv_tokens": sizes.crowded_cells,
        "max_model_len": 1024 if sizes.crowded_cells > 1024 else 256,
        "max_num_seqs": sizes.num_crowded,
    }
    fixed = OurSettings("edgerun-deterministic-small", ("--deterministic",), llm)
    unified = OurSettings(
        "edgerun-unified-small", llm={**llm, "kv_layout": "unified", "flash_attention": "on"}
    )
    slots_that_fit = max(1, sizes.crowded_cells // (room + 44))
    peers = [
        (PeerSettings("unified-fa", ("-kvu", "-fa", "on")), sizes.num_crowded),
        (PeerSettings("streams", ("-no-kvu", "-fa", "off")), slots_that_fit),  # it queues the others
    ]
    title = (
        f"{sizes.num_crowded} chats of {sizes.crowded_prompt} + {sizes.crowded_answer} tokens at once on "
        f"{sizes.crowded_cells} cells"
    )
    report = RowReport("overcommit", title, str(fixed), "see the notes")
    for ours in (fixed, unified):
        with machine.ours(ours) as server:
            bench.warm_up(server)
            crowd = bench.load(server, chats)
            alone = bench.load(server, chats, max_concurrent=1)
        report.notes += _crowd_notes(f"edgerun, {ours}", crowd, alone)
        report.data[ours.name] = _texts(crowd, alone)
    for settings, slots in peers:
        with machine.peer(settings, slots, sizes.crowded_cells) as server:
            bench.warm_up(server)
            crowd = bench.load(server, chats)
            alone = bench.load(server, chats, max_concurrent=1)
        report.notes += _crowd_notes(
            f"llama-server `-np {slots} -c {sizes.crowded_cells} {settings}`", crowd, alone
        )
    return report


def _crowd_notes(name: str, crowd: Load, alone: Load) -> list[str]:
    equal = sum(a.text == b.text and not a.error for a, b in zip(crowd.outcomes, alone.outcomes, strict=True))
    whole = sum(one.num_completion_tokens == one.chat.max_tokens for one in crowd.finished)
    kinds = sorted(set(crowd.errors))
    notes = [
        f"{name}: {len(crowd.finished)} of {len(crowd.outcomes)} finished ({whole} whole), "
        f"{len(crowd.errors)} failed; {equal} equal to the same asked one by one (of which "
        f"{len(alone.finished)} finished); "
        f"wall {crowd.wall_s:.1f} s, CPU {crowd.cpu_s:.1f} s, TTFT p50 {crowd.ttft_s(0.5):.1f} s, "
        f"worst ITL {quantile((gap for one in crowd.outcomes for gap in one.itls_s), 1):.1f} s"
    ]
    return notes + [f"{name}: error: {kind}" for kind in kinds[:3]]


def _texts(crowd: Load, alone: Load) -> list[list[str]]:
    """Both texts of each chat that differs."""
    pairs = zip(crowd.outcomes, alone.outcomes, strict=True)
    return [[a.text, b.text] for a, b in pairs if a.text != b.text]
