"""Which version of a model is served: the policy of its config, and a pin that a rollback leaves.

Owns `state.json` in the model's folder of the store. Does not know what a version holds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import msgspec

from edgerun.repository.config_file import VersionPolicy
from edgerun.repository.files import write_atomically

logger = logging.getLogger(__name__)

STATE_NAME = "state.json"


class VersionState(msgspec.Struct, frozen=True, kw_only=True):
    """pinned: the version that a rollback chose; 0: none, the policy decides."""

    pinned: int = 0


def read_state(folder: Path) -> VersionState:
    """The state beside a model's versions. A damaged file is reported in the log and counts as no pin."""
    path = folder / STATE_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=VersionState)
    except FileNotFoundError:
        return VersionState()
    except (OSError, msgspec.DecodeError) as error:
        logger.warning(
            "%s cannot be read (%s): no version is pinned; `edgerun models rollback` mends it", path, error
        )
        return VersionState()


def write_state(folder: Path, state: VersionState) -> None:
    """Atomic: a crash leaves the old state or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / STATE_NAME, msgspec.json.encode(state))


def allowed(policy: VersionPolicy, known: Collection[int]) -> list[int]:
    """Those of `known` that the policy serves, newest first."""
    newest_first = sorted(set(known), reverse=True)
    if policy.specific:
        return [version for version in newest_first if version in policy.specific]
    return newest_first[: policy.latest]


def active(policy: VersionPolicy, present: Collection[int], pinned: int) -> int:
    """The version to serve of those `present` on this machine; 0: none.

    A pin counts as long as its version is there, whatever the policy says: a rollback is a person's word.
    """
    if pinned in present:
        return pinned
    return next(iter(allowed(policy, present)), 0)


def previous(present: Collection[int], current: int) -> int:
    """The version that a rollback from `current` goes to; 0: none."""
    return max((version for version in present if version < current), default=0)
