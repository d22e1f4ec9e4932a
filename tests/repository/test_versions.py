"""versions: the policy chooses among what is there, a pin goes before it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from edgerun.repository.config_file import VersionPolicy
from edgerun.repository.versions import (
    STATE_NAME,
    VersionState,
    active,
    allowed,
    previous,
    read_state,
    write_state,
)


def test_latest_serves_the_newest_n() -> None:
    assert allowed(VersionPolicy(), [1, 3, 2]) == [3]
    assert allowed(VersionPolicy(latest=2), [1, 3, 2]) == [3, 2]


def test_specific_serves_exactly_those_that_are_known() -> None:
    assert allowed(VersionPolicy(specific=(1, 7)), [1, 2, 3]) == [1]


def test_pin_goes_before_the_policy_while_it_is_there() -> None:
    assert active(VersionPolicy(), [1, 2], pinned=1) == 1
    assert active(VersionPolicy(), [2], pinned=1) == 2
    assert active(VersionPolicy(), [], pinned=1) == 0


def test_previous_is_the_next_older_that_is_there() -> None:
    assert previous([1, 2, 5], 5) == 2
    assert previous([5], 5) == 0


def test_state_survives_and_a_damaged_one_is_no_pin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "m"
    assert read_state(folder) == VersionState()
    write_state(folder, VersionState(pinned=3))
    assert read_state(folder).pinned == 3
    assert [path.name for path in folder.iterdir()] == [STATE_NAME]
    (folder / STATE_NAME).write_text("{")
    with caplog.at_level(logging.WARNING):
        assert read_state(folder) == VersionState()
    assert STATE_NAME in caplog.text
