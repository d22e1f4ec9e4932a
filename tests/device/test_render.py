from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgerun.device.probe import probe
from edgerun.device.render import render
from edgerun.device.telemetry import DeviceLoad
from tests.device.trees import BOARDS, FIXTURES


@pytest.mark.parametrize("board", BOARDS)
def test_every_provider_and_reason_is_shown(board: str) -> None:
    report = probe(FIXTURES / board)
    text = render(report)

    assert all(choice.reason in text for choice in report.providers)
    assert text.count("✓") == 2
    assert all(note in text for note in report.notes)
    assert "None" not in text


def test_jetson_memory_is_shown_as_shared_and_a_card_has_its_own() -> None:
    assert "of 7.4 GiB, shared with the GPU" in render(probe(FIXTURES / "orin-nano-8gb-jp62"))
    card = render(probe(FIXTURES / "desktop-rtx4090"))
    assert "compute capability 8.9, 24.0 GiB, driver 570.133.07" in card
    assert "shared" not in card


def test_values_are_aligned() -> None:
    head = render(probe(FIXTURES / "orin-nano-8gb-jp62")).split("\n\n")[0].splitlines()

    assert len({len(line) - len(line[12:].lstrip()) for line in head}) == 1
    assert [line[:12].strip() for line in head] == ["Board", "Software", "CPU", "Memory", "GPU", "Power mode"]


def test_load_shows_only_what_could_be_read() -> None:
    report = probe(FIXTURES / "laptop-cpu")

    assert "Now         CPU 12 %, 40 °C\n" in render(report, DeviceLoad(12.3, None, 40.0, None, 1))
    assert "Now" not in render(report, DeviceLoad(None, None, None, None, None))


def test_kind_without_a_usable_provider_says_so(tmp_path: Path) -> None:
    report = probe(tmp_path)
    unusable = tuple(replace(c, chosen=False) for c in report.providers)
    assert render(replace(report, providers=unusable)).count("! none can be used") == 2
