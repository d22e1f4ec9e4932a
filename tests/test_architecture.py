"""The import rules and sizes of ARCHITECTURE.md, enforced on every file.

Changing MAY_IMPORT is a design change: say why in the commit.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# For everyone: no package of ours is below these.
COMMON = frozenset({"errors", "log", "metrics", "config", "paths"})

# Package, or one module of it where the two differ (the longest name counts) -> what it may import of edgerun
# besides COMMON and itself. A name stands for itself and everything below it.
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "errors": frozenset(),
    "paths": frozenset(),
    "log": frozenset(),
    "metrics": frozenset(),
    "config": frozenset(),
    "native": frozenset(),
    "text": frozenset(),
    "repository": frozenset(),
    "pixels": frozenset({"repository.spec"}),
    "device": frozenset({"native", "repository.spec"}),
    "llm": frozenset({"text.prompt", "repository.spec", "native", "engine.messages"}),
    # It sizes the KV cache from the memory that is free, also inside a container.
    "llm.loader": frozenset(
        {"device.cgroup", "device.files", "device.memory", "repository.spec", "engine.messages"}
    ),
    "vision": frozenset({"native", "repository.spec", "engine.messages"}),
    # The server's side of the process boundary ...
    "engine": frozenset({"text.prompt", "repository.spec"}),
    # ... and the modules that run in the engine process, or in a child that tries a model file.
    "engine.main": frozenset({"llm", "vision", "native", "text.prompt", "repository.spec"}),
    "engine.models": frozenset({"llm", "vision", "native", "text.prompt", "repository.spec"}),
    "engine.check": frozenset({"llm.llama_api", "llm.loop", "text.prompt", "repository.spec"}),
    "server": frozenset({"text", "pixels", "engine", "repository", "device", "native"}),
    "cli": frozenset({"server", "engine", "repository", "device", "native"}),
    "__main__": frozenset({"cli"}),
}

# Of the engine only its client's side may be seen from outside; the process itself is started, not imported.
ENGINE_PROCESS = frozenset({"engine.main", "engine.models"})

NATIVE_HOMES: Mapping[str, frozenset[str]] = {
    "llama_cpp": frozenset({"llm.llama_api"}),
    "onnxruntime": frozenset({"vision.ort_runner", "device.ort_smoke"}),
    "tensorrt": frozenset({"vision.trt_build", "vision.trt_runner"}),
    "tensorrt_rtx": frozenset({"vision.trt_build", "vision.trt_runner"}),
    "textual": frozenset(),
}

TOP_LEVEL = frozenset(
    {
        *(".ci", ".git", ".gitattributes", ".gitignore"),
        *("ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml"),
        *("edgerun", "models", "packaging", "tests", "tui"),
        *(".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "dist"),  # git ignores these
    }
)

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 8


@dataclass(frozen=True)
class Import:
    importer: str  # "llm.worker", without "edgerun."
    target: str  # "edgerun.llm.request" or "numpy"
    line: int
    is_at_load: bool  # runs when the module is imported, not inside a function


def source_files() -> dict[str, str]:
    """Module name without "edgerun." -> source; the package itself is ""."""
    found = {}
    for file in sorted((ROOT / "edgerun").rglob("*.py")):
        parts = list(file.relative_to(ROOT / "edgerun").with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = file.read_text()
    return found


parse = functools.lru_cache(maxsize=None)(ast.parse)  # each file is read by several tests


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import of a module, also those inside functions and behind TYPE_CHECKING."""
    tree = parse(source)
    deferred = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_type_checking(outer)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; write the whole name"
            # `from edgerun.engine import messages` imports a module, `from edgerun.paths import x` a name:
            # both are spelt out and the caller keeps what is a module.
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        for target in targets:
            yield Import(module, target, getattr(node, "lineno", 0), id(node) not in deferred)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def violations(files: Mapping[str, str]) -> list[str]:
    """One line for each import that MAY_IMPORT and NATIVE_HOMES forbid."""
    found = []
    for module, source in files.items():
        for imported in imports_of(module, source):
            problem = _problem(imported)
            if problem is not None:
                found.append(f"edgerun.{module}:{imported.line} imports {imported.target}: {problem}")
    return found


def _problem(imported: Import) -> str | None:
    head, _, inner = imported.target.partition(".")
    if head != "edgerun":
        homes = NATIVE_HOMES.get(head)
        if homes is None or imported.importer in homes:
            return None
        return f"{head} lives in {', '.join(sorted(homes)) or 'the terminal UI'} only"
    target = inner.partition(".")[0]
    package = imported.importer.partition(".")[0]
    if target in COMMON or target in ("", package) or target.startswith("__"):
        return None
    rule = _longest_rule(imported.importer)
    if rule is None:
        return f"{package or 'the package itself'} has no row in MAY_IMPORT"
    if package not in ("engine", "__main__") and any(_is_below(inner, name) for name in ENGINE_PROCESS):
        return "it runs in the engine process, which is started and not imported"
    if not any(_is_below(inner, allowed) for allowed in MAY_IMPORT[rule]):
        return f"{rule} may import {', '.join(sorted(MAY_IMPORT[rule])) or 'nothing'} of edgerun"
    return None


def _longest_rule(module: str) -> str | None:
    matching = [rule for rule in MAY_IMPORT if _is_below(module, rule)]
    return max(matching, key=len, default=None)


def _is_below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def loaded_with(entry: str, files: Mapping[str, str]) -> set[str]:
    """Modules of ours and top-level names of others that run when entry is imported."""
    seen: set[str] = set()
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for imported in imports_of(module, files.get(module, "")):
            if not imported.is_at_load:
                continue
            head, _, inner = imported.target.partition(".")
            if head != "edgerun":
                seen.add(head)
                continue
            # The name itself when it is a module, and every package on the way to it.
            parts = inner.split(".")
            waiting += [name for n in range(len(parts) + 1) if (name := ".".join(parts[:n])) in files]
    return seen


def test_every_import_follows_the_table() -> None:
    assert violations(source_files()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("llm.scheduler", "from edgerun.vision.batcher import DynamicBatcher"),
        ("vision.worker", "def load():\n    import edgerun.llm.engine"),
        ("server.app", "import llama_cpp"),
        ("server.app", "from edgerun.engine.main import main"),
        ("server.app", "from edgerun.engine import main"),
        ("server.app", "from edgerun import llm"),
        ("engine.client", "from edgerun.llm.request import Request"),
        ("repository.pull", "def f():\n    from edgerun.device.probe import probe"),
        ("device.probe", "from edgerun.repository.repository import Repository"),
        ("native.build", "from edgerun.device import probe"),
        ("cli.demo", "from edgerun.vision.worker import VisionWorker"),
        ("llm.worker", "try:\n    import onnxruntime as ort\nexcept ImportError:\n    pass"),
        ("cli.main", "import textual.app"),
        ("errors", "from edgerun.text.prompt import Prompt"),
        ("newpackage.thing", "from edgerun.text.prompt import Prompt"),
    ],
)
def test_checker_catches_a_forbidden_import(module: str, source: str) -> None:
    assert len(violations({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("llm.llama_api", "def load():\n    import llama_cpp"),
        ("llm.worker", "from edgerun.engine.messages import Accepted"),
        (
            "server.chat",
            "import edgerun\nfrom edgerun.errors import EngineLost\nfrom edgerun import paths, __version__",
        ),
        ("server.app", "from edgerun.engine.client import EngineClient"),
        ("engine.main", "from edgerun.llm.worker import LlmWorker"),
    ],
)
def test_checker_lets_an_allowed_import_pass(module: str, source: str) -> None:
    assert violations({module: source}) == []


@pytest.mark.parametrize("entry", ["server", "cli", "engine.client"])
def test_server_and_command_line_load_no_runtime(entry: str) -> None:
    """A crash of llama.cpp or ONNX Runtime must not be able to take these processes down."""
    files = source_files()
    modules = [name for name in files if _is_below(name, entry)]
    assert modules, f"edgerun.{entry} is gone: name the server's side of the engine here"
    for module in modules:
        loaded = loaded_with(module, files)
        runtimes = {name for name in loaded if name.partition(".")[0] in {"llm", "vision", *NATIVE_HOMES}}
        assert runtimes == set(), f"importing edgerun.{module} loads {sorted(runtimes)}"


def test_loading_is_followed_through_modules_and_not_into_functions() -> None:
    files = {
        "server": "",
        "server.app": "from edgerun.engine import client",
        "engine": "",
        "engine.client": "import edgerun.llm\ndef f():\n    import onnxruntime",
        "llm": "import llama_cpp",
    }
    assert {"engine.client", "llm", "llama_cpp"} <= loaded_with("server.app", files)
    assert "onnxruntime" not in loaded_with("server.app", files)


def test_native_needs_the_standard_library_only() -> None:
    """`make run` uses it before anything is installed."""
    files = source_files()
    for module in (name for name in files if _is_below(name, "native")):
        others = {
            imported.target.partition(".")[0]
            for imported in imports_of(module, files[module])
            if imported.target.partition(".")[0] not in {"edgerun", *sys.stdlib_module_names}
        }
        assert others == set(), f"edgerun.{module} imports {sorted(others)}"


def test_terminal_ui_imports_nothing_of_edgerun() -> None:
    for file in (ROOT / "tui").rglob("*.py"):
        heads = {imported.target.partition(".")[0] for imported in imports_of("tui", file.read_text())}
        assert "edgerun" not in heads, f"{file}: it speaks HTTP to the server"


def test_print_is_for_the_command_line_only() -> None:
    found = [
        f"edgerun.{module}:{node.lineno}"
        for module, source in source_files().items()
        if not _is_below(module, "cli")
        for node in ast.walk(parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_files_and_functions_stay_readable() -> None:
    found = []
    for module, source in source_files().items():
        num_lines = len(source.splitlines())
        if num_lines > MAX_FILE_LINES:
            found.append(f"edgerun.{module} has {num_lines} lines: split it by who owns which state")
        for node in ast.walk(parse(source)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"edgerun.{module}.{node.name} has {length} lines")
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            num_parameters = sum(argument.arg not in ("self", "cls") for argument in arguments)
            if num_parameters > MAX_PARAMETERS and not _is_command(node):
                found.append(f"edgerun.{module}.{node.name} has {num_parameters} parameters")
    assert found == []


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """click hands each option of a command over as a parameter; the contract decides how many there are."""
    return any("command" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_top_level_holds_only_what_the_map_shows() -> None:
    unexpected = {entry.name for entry in ROOT.iterdir()} - TOP_LEVEL
    assert unexpected == set()


def test_packaging_folder_is_no_python_package() -> None:
    """It would shadow PyPI's `packaging`, which pip and pytest use."""
    assert not (ROOT / "packaging" / "__init__.py").exists()
