from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_show_names_each_setting_with_value_and_origin(run: Run, home: Path) -> None:
    path = home / "config" / "edgerun" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('models = ["mine"]')
    result = run("config", "show", "--json", EDGERUN_PORT="9000")
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert (rows["port"]["value"], rows["port"]["origin"]) == (9000, "EDGERUN_PORT")
    assert (rows["models"]["value"], rows["models"]["origin"]) == (["mine"], str(path))
    assert (rows["host"]["value"], rows["host"]["origin"]) == ("127.0.0.1", "default")


def test_show_as_text_has_a_line_for_each(run: Run) -> None:
    lines = run("config", "show", EDGERUN_PORT="9000").stdout.splitlines()
    assert [line.split("\t")[:3] for line in lines if line.startswith("port")] == [
        ["port", "9000", "EDGERUN_PORT"]
    ]


def test_unknown_setting_fails_with_the_nearest(run: Run) -> None:
    result = run("config", "show", EDGERUN_PROT="1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: EDGERUN_PROT")
    assert "EDGERUN_PORT" in result.stderr
