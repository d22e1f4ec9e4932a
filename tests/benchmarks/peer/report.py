"""What a row found, as tables of Markdown and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a row, a value a round for each side. other: what ours is compared with.

    limit: of the ratio ours / other; `at_least` turns it around. Without `other` it is a limit of our value.
    """

    what: str
    unit: str
    ours: tuple[float, ...]
    other: tuple[float, ...] = ()
    other_name: str = "llama-server"
    limit: float | None = None
    at_least: bool = False

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours by the other's, round by round; empty where nothing is compared."""
        if not self.other:
            return ()
        return tuple(
            mine / other if other else math.nan for mine, other in zip(self.ours, self.other, strict=True)
        )

    @property
    def is_met(self) -> bool | None:
        """None without a limit, and where nothing was measured."""
        value = statistics.median(self.ratios or self.ours)
        if self.limit is None or math.isnan(value):
            return None
        return value >= self.limit if self.at_least else value <= self.limit

    def cells(self) -> list[str]:
        limit = "" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:g}"
        met = {None: "", True: " met", False: " **missed**"}[self.is_met]
        ratios = self.ratios
        ratio = f"**{statistics.median(ratios):.3f}** ({_span(ratios, '.3f')})" if ratios else ""
        return [
            f"{self.what}, {self.unit}" if self.unit else self.what,
            _median_and_span(self.ours),
            _median_and_span(self.other)
            + ("" if self.other_name == "llama-server" else f" {self.other_name}"),
            ratio,
            limit + met,
        ]


@dataclass(slots=True)
class RowReport:
    """name: as `--rows` takes it. peer: its settings. data: what else belongs into the JSON."""

    name: str
    title: str
    ours: str
    peer: str
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        out = [f"## {self.name}: {self.title}", "", f"Ours: {self.ours}. Peer: `{self.peer}`.", ""]
        if self.lines:
            out += _table(
                ["median (range)", "edgerun", "compared with", "ratio, median (range)", "limit"],
                [line.cells() for line in self.lines],
            )
        return "\n".join([*out, "", *(f"- {note}" for note in self.notes), ""])

    def as_json(self) -> dict[str, Any]:
        lines = [{**asdict(line), "ratios": line.ratios, "is_met": line.is_met} for line in self.lines]
        return {
            "name": self.name,
            "title": self.title,
            "ours": self.ours,
            "peer": self.peer,
            "lines": lines,
            "notes": self.notes,
            "data": self.data,
        }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _median_and_span(values: Sequence[float]) -> str:
    if not values:
        return ""
    median = statistics.median(values)
    form = ".0f" if abs(median) >= 1000 else ".1f" if abs(median) >= 10 else ".3f"
    if len(values) == 1 or min(values) == max(values):
        return format(median, form)
    return f"{median:{form}} ({_span(values, form)})"


def _span(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"
