"""Made-up machines for these tests: folders that stand for `/`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from edgerun.device.files import SystemFiles

FIXTURES = Path(__file__).parent / "fixtures"
BOARDS = sorted(path.parent.name for path in FIXTURES.glob("*/proc"))
EXPECTED = {k: v for k, v in json.loads((FIXTURES / "expected.json").read_text()).items() if k != "_"}


def make_tree(root: Path, contents: Mapping[str, str | bytes]) -> SystemFiles:
    """Write each path's content under root and read it as a sysroot."""
    for path, content in contents.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return SystemFiles(root)


def copy_board(board: str, root: Path) -> Path:
    target = root / board
    shutil.copytree(FIXTURES / board, target)
    return target
