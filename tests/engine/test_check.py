"""What is remembered of a model that was tried."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edgerun.engine.check import CheckedModels, CheckRequest, check_model
from edgerun.engine.messages import LlmTuning, Start
from edgerun.repository.spec import LlmSettings, ModelSpec

START = Start(
    lib_dir="",
    llm_provider="cpu",
    llm_reason="a test",
    vision_provider="",
    vision_reason="a test",
    num_threads=2,
)
TUNING = LlmTuning(kv_layout="streams", flash_attention=False, num_threads=2, trials=("a", "b"))


@pytest.fixture
def checked(tmp_path: Path) -> CheckedModels:
    return CheckedModels(tmp_path / "cache" / "checked.json")


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    return ModelSpec("m", "llm", 1, str(tmp_path / "m.gguf"), "", 4)


def test_what_was_measured_is_remembered_and_needs_no_child(checked: CheckedModels, spec: ModelSpec) -> None:
    request = CheckRequest(spec, START)
    assert checked.find(checked.key(request)) is None
    assert checked.tuning_of(spec) is None
    checked.remember(checked.key(request), request, TUNING)
    assert checked.tuning_of(spec) == ("cpu", TUNING)
    assert asyncio.run(check_model(spec, START, CheckedModels(checked.path))) == TUNING


def test_what_was_measured_beside_other_programs_is_measured_again_but_not_for_ever(
    checked: CheckedModels, spec: ModelSpec
) -> None:
    request = CheckRequest(spec, START)
    settled = []
    for _ in range(3):
        checked.remember(checked.key(request), request, replace_tuning(was_busy=True))
        known = checked.find(checked.key(request))
        assert known is not None
        settled.append(known.is_settled)
    assert settled == [False, False, True]


def replace_tuning(**changes: bool) -> LlmTuning:
    return msgspec.structs.replace(TUNING, **changes)


def test_a_model_with_nothing_to_choose_is_remembered_too(checked: CheckedModels, spec: ModelSpec) -> None:
    request = CheckRequest(spec, START)
    checked.remember(checked.key(request), request, None)
    assert checked.find(checked.key(request)) is not None
    assert checked.tuning_of(spec) is None
    assert asyncio.run(check_model(spec, START, checked)) is None


def test_whatever_could_change_the_choice_changes_the_key(checked: CheckedModels, spec: ModelSpec) -> None:
    starts = [
        START,
        Start(**{**_fields(START), "num_threads": 4}),  # type: ignore[arg-type]
        Start(**{**_fields(START), "llm_provider": "cuda"}),  # type: ignore[arg-type]
        Start(**{**_fields(START), "lib_dir": "/elsewhere"}),  # type: ignore[arg-type]
        Start(**{**_fields(START), "deterministic": True}),  # type: ignore[arg-type]
    ]
    keys = {checked.key(CheckRequest(spec, start)) for start in starts}
    fixed = replace(spec, llm=LlmSettings(kv_layout="unified"))
    keys.add(checked.key(CheckRequest(fixed, START)))
    Path(spec.path).write_bytes(b"GGUF, another one")
    keys.add(checked.key(CheckRequest(spec, START)))
    assert len(keys) == len(starts) + 2


def _fields(start: Start) -> dict[str, object]:
    return {name: getattr(start, name) for name in start.__struct_fields__}


def test_other_settings_were_not_measured(checked: CheckedModels, spec: ModelSpec) -> None:
    request = CheckRequest(spec, START)
    checked.remember(checked.key(request), request, TUNING)
    assert checked.tuning_of(replace(spec, llm=LlmSettings(kv_layout="unified"))) is None


@pytest.mark.parametrize("content", ['["an", "older", "format"]', "{", '{"a": 1}', ""])
def test_an_older_or_damaged_file_means_checking_again(
    checked: CheckedModels, spec: ModelSpec, content: str
) -> None:
    checked.path.parent.mkdir()
    checked.path.write_text(content)
    request = CheckRequest(spec, START)
    assert checked.find(checked.key(request)) is None
    checked.remember(checked.key(request), request, TUNING)
    assert checked.tuning_of(spec) == ("cpu", TUNING)


@pytest.mark.native
def test_the_child_measures_a_model_that_runs(
    checked: CheckedModels, llama_lib_dir: Path, tiny_gguf: Path
) -> None:
    spec = ModelSpec("tiny", "llm", 1, str(tiny_gguf), "", 0)
    start = Start(**{**_fields(START), "lib_dir": str(llama_lib_dir)})  # type: ignore[arg-type]
    tuning = asyncio.run(check_model(spec, start, checked))
    assert tuning is not None
    assert checked.tuning_of(spec) == ("cpu", tuning)
    fixed = replace(spec, llm=LlmSettings(kv_layout="unified", flash_attention="on", num_threads=1))
    assert asyncio.run(check_model(fixed, start, checked)) is None
    calm = Start(**{**_fields(start), "deterministic": True})  # type: ignore[arg-type]
    assert asyncio.run(check_model(spec, calm, checked)) is None
