from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_list_names_each_folder_and_whether_it_fits(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "libllama.so").write_bytes(b"")
    rows = json.loads(run("native", "list", "--json", EDGERUN_NATIVE_DIR=str(folder)).stdout)
    assert rows[0] == {
        "name": "cpu",
        "provider": "cpu",
        "path": str(folder),
        "origin": "EDGERUN_NATIVE_DIR",
        "problem": None,
    }
