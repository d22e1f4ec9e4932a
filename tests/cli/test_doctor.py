from __future__ import annotations

import json

from tests.cli.conftest import Run


def test_exit_status_says_whether_something_fails(run: Run) -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    fails = [check for check in report["checks"] if check["status"] == "fail"]
    assert report["ok"] is (fails == [])
    assert result.exit_code == (1 if fails else 0)


def test_a_wrong_setting_makes_it_fail(run: Run) -> None:
    result = run("doctor", EDGERUN_PORT="many")
    assert result.exit_code == 1
    assert "fail  settings: EDGERUN_PORT is 'many'" in result.stdout
    assert "  -> " in result.stdout
