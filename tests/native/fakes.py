"""Stand-ins for pip, cmake and ninja: they make the files the real ones would, in no time."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edgerun.native import LLAMA_CPP_PYTHON
from edgerun.native.toolchain import Tools

SDIST_NAME = f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
WHEEL_NAME = f"llama_cpp_python-{LLAMA_CPP_PYTHON}-py3-none-linux_x86_64.whl"


def write_sdist(file: Path, members: Mapping[str, str] | None = None) -> Path:
    """An sdist with the given files below vendor/llama.cpp, and one outside of it."""
    top = f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    contents = {f"{top}/README.md": "outside"}
    for name, text in (members or {"CMakeLists.txt": "project(llama)"}).items():
        contents[f"{top}/vendor/llama.cpp/{name}"] = text
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for name, text in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return file


class FakeRunner:
    """Plays pip, cmake and ninja by the words of their commands; remembers each command and its env.

    failing: a word; a command that holds it prints "boom" and exits 1. during_compile is called in the
    middle of ninja.
    """

    def __init__(self, *, failing: str | None = None, has_full_wheel: bool = False) -> None:
        self.commands: list[list[str]] = []
        self.envs: list[dict[str, str]] = []
        self.during_compile: Callable[[], None] = lambda: None
        self._failing = failing
        self._has_full_wheel = has_full_wheel

    def __call__(
        self, command: Sequence[str], *, log: Path, on_line: Callable[[str], None], env: Mapping[str, str]
    ) -> int:
        command = list(command)
        self.commands.append(command)
        self.envs.append(dict(env))
        if self._failing is not None and self._failing in command:
            with log.open("a") as out:
                out.write("boom\n")
            return 1
        if "download" in command:
            return self._download(command)
        if "wheel" in command:
            (Path(command[command.index("--wheel-dir") + 1]) / WHEEL_NAME).write_bytes(b"layer")
        elif "install" in command:
            on_line("Collecting numpy")
            on_line("Successfully installed numpy")
        elif "-C" in command:
            self._compile(Path(command[command.index("-C") + 1]), on_line)
        return 0

    def num_runs(self, word: str) -> int:
        return sum(word in command for command in self.commands)

    def _download(self, command: list[str]) -> int:
        target = Path(command[command.index("--dest") + 1])
        if "--only-binary" not in command:
            write_sdist(target / SDIST_NAME)
            return 0
        if self._has_full_wheel:
            (target / WHEEL_NAME).write_bytes(b"full")
        return 0 if self._has_full_wheel else 1

    def _compile(self, build: Path, on_line: Callable[[str], None]) -> None:
        on_line("ninja: Entering directory")
        on_line("[1/2] Building ggml.c")
        self.during_compile()
        libraries = build / "bin"
        libraries.mkdir(parents=True)
        (libraries / "libllama.so.0").write_bytes(b"code")
        (libraries / "libllama.so").symlink_to("libllama.so.0")
        on_line("[2/2] Linking libllama.so")


def fake_fetch_sources(folder: Path, **_: object) -> Path:
    return write_sdist(folder / SDIST_NAME)


def fake_find_tools(scratch: Path, **_: object) -> Tools:
    return Tools("cmake", "ninja", {})


class Recorder:
    """A Report that keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.calls.append((stage, done, total))

    @property
    def stages(self) -> list[str]:
        return [stage for stage, _, _ in self.calls]
