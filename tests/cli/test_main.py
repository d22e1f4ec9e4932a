from __future__ import annotations

import ast
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import edgerun
from edgerun.cli.main import COMMANDS, EdgerunGroup, cli, main
from edgerun.errors import InvalidRequest
from tests.cli.conftest import Run
from tests.cli.fake_server import FakeServer

HEAVY = ("numpy", "onnxruntime", "llama_cpp", "fastapi", "httpx", "rich", "pydantic", "PIL", "jinja2")


def group_with(body: object) -> EdgerunGroup:
    """edgerun's own group around one command that does `body`."""

    class Group(EdgerunGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            return click.Command("probe", callback=body)

    return Group(params=cli.params, callback=lambda debug: None)


def invoke(body: object, *args: str) -> Result:
    return CliRunner().invoke(group_with(body), [*args, "probe"])


def fails() -> None:
    raise InvalidRequest("port is 'x';\n  give a number")


def breaks() -> None:
    raise ZeroDivisionError("bug")


def is_interrupted() -> None:
    raise KeyboardInterrupt


def test_version_is_one_line(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"edgerun {edgerun.__version__}\n")


def test_error_of_ours_is_one_line_and_exit_1() -> None:
    result = invoke(fails)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: port is 'x'; give a number\n"


def test_bug_is_one_line_without_traceback_too() -> None:
    result = invoke(breaks)
    assert result.exit_code == 1
    assert result.stderr == "error: ZeroDivisionError: bug; this is a bug in edgerun, --debug shows where\n"


@pytest.mark.parametrize(("body", "kind"), [(fails, InvalidRequest), (breaks, ZeroDivisionError)])
def test_debug_lets_the_traceback_through(body: object, kind: type[Exception]) -> None:
    assert isinstance(invoke(body, "--debug").exception, kind)


def test_ctrl_c_exits_130() -> None:
    assert invoke(is_interrupted).exit_code == 130


def test_exit_status_of_a_command_is_kept() -> None:
    assert invoke(lambda: click.get_current_context().exit(1)).exit_code == 1
    assert invoke(lambda: None).exit_code == 0


def test_unknown_command_is_a_usage_error_that_names_the_nearest(run: Run) -> None:
    result = run("clasify")
    assert result.exit_code == 2
    assert "did you mean classify?" in result.stderr


def test_unknown_option_is_a_usage_error(run: Run) -> None:
    assert run("probe", "--nothing").exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(run: Run, name: str) -> None:
    def check(path: list[str], command: click.Command) -> None:
        result = run(*path, "--help")
        assert result.exit_code == 0
        assert "Example" in result.stdout, path
        assert f"edgerun {path[0]}" in result.stdout, path
        if isinstance(command, click.Group):
            for sub, subcommand in command.commands.items():
                check([*path, sub], subcommand)

    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    check([name], command)


def test_help_lists_every_command_with_its_line(run: Run) -> None:
    shown = run("--help").stdout
    for name, (_, line) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", shown, re.MULTILINE)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["chat", "--help"], ["config", "show"]])
def test_light_commands_import_nothing_heavy(args: list[str], home: Path) -> None:
    code = (
        "import sys\n"
        "from edgerun.cli.main import cli\n"
        f"try: cli.main({args!r})\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        f"print(sorted(set({HEAVY!r}) & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_command_modules_import_nothing_heavy_at_top() -> None:
    for module, _ in COMMANDS.values():
        path = Path(edgerun.__file__).parent / f"{module.removeprefix('edgerun.').replace('.', '/')}.py"
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in HEAVY], path


def test_reader_that_leaves_early_is_no_error(home: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m edgerun config show | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_sent_to_the_makers_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "")
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    monkeypatch.setattr(cli, "main", lambda prog_name: None)
    main()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


def run_in_shell(line: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`line` with `edgerun` in it, in bash."""
    line = line.replace("edgerun", f"{shlex.quote(sys.executable)} -m edgerun")
    return subprocess.run(["bash", "-c", line], capture_output=True, env={**os.environ, **env})


@pytest.mark.parametrize("command", ["config show", "--help", "--version"])
def test_full_disk_is_one_line(home: Path, command: str) -> None:
    done = run_in_shell(f"edgerun {command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_nowhere(home: Path, closed: str) -> None:
    done = run_in_shell(f"edgerun config show {closed}")
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_stdin_asks_nothing(home: Path) -> None:
    assert run_in_shell("edgerun chat <&-").returncode == 2


def test_letters_that_the_locale_lacks_are_no_error(home: Path) -> None:
    done = run_in_shell("edgerun config show", PYTHONIOENCODING="latin-1:strict", EDGERUN_SOCKET="/tmp/日本")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/tmp/??" in done.stdout


class Terminal:
    """A command on a pseudo-terminal. Whatever goes wrong, it ends within the deadline."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._deadline = time.monotonic() + 60
        self.shown = b""
        self._num_read = 0
        self._leader, follower = pty.openpty()
        self._process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, env=env, start_new_session=True
        )
        os.close(follower)

    def type(self, keys: bytes) -> None:
        os.write(self._leader, keys)

    def read_until(self, text: bytes) -> None:
        """Text that comes after what was waited for before."""
        while (start := self.shown.find(text, self._num_read)) < 0:
            self._read()
        self._num_read = start + len(text)

    def wait(self) -> int:
        try:
            while True:
                self._read()
        except OSError:  # Linux: the other end is closed
            return self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._leader)

    def _read(self) -> None:
        ready, _, _ = select.select([self._leader], [], [], max(0, self._deadline - time.monotonic()))
        assert ready, f"nothing more came after {self.shown!r}"
        self.shown += os.read(self._leader, 1000)


def test_on_a_terminal_no_command_opens_the_chat(server: FakeServer, home: Path) -> None:
    env = {**os.environ, "EDGERUN_SOCKET": str(server.socket), "TERM": "dumb"}
    with closing(Terminal([sys.executable, "-m", "edgerun"], env)) as terminal:
        terminal.read_until(b"> ")
        terminal.type(b"hi\n")
        terminal.read_until(b"rld")
        terminal.read_until(b"> ")  # keys before the prompt would be lost to the change of terminal modes
        terminal.type(b"\x04")
        assert terminal.wait() == 0
        assert b"line-by-line chat" in terminal.shown
    assert server.chats[0]["messages"] == [{"role": "user", "content": "hi"}]
