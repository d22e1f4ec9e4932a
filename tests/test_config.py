from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from edgerun.config import LoadedSettings, Settings, load_settings
from edgerun.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def load(*files: Path, environ: dict[str, str] | None = None, **flags: object) -> LoadedSettings:
    return load_settings(flags, environ=environ or {}, files=files)


def test_without_sources_everything_is_default(tmp_path: Path) -> None:
    loaded = load(tmp_path / "absent.toml")
    assert loaded.settings == Settings()
    assert dict(loaded.origins) == {item.name: "default" for item in fields(Settings)}


def test_later_sources_win_and_are_remembered(tmp_path: Path) -> None:
    system = write(tmp_path / "system.toml", 'port = 1\nhost = "0.0.0.0"\nnum_threads = 1\nmodels = ["a"]')
    user = write(tmp_path / "user.toml", "port = 2\nnum_threads = 2")
    named = write(tmp_path / "named.toml", "num_threads = 3")
    loaded = load_settings(
        {"port": 4, "models": ()},
        config_file=named,
        environ={"EDGERUN_PORT": "3", "EDGERUN_LOG_LEVEL": "debug", "OTHER": "x"},
        files=[system, user],
    )
    settings, origins = loaded.settings, loaded.origins
    assert (settings.host, origins["host"]) == ("0.0.0.0", str(system))
    assert (settings.models, origins["models"]) == (("a",), str(system))
    assert (settings.num_threads, origins["num_threads"]) == (3, str(named))
    assert (settings.log_level, origins["log_level"]) == ("debug", "EDGERUN_LOG_LEVEL")
    assert (settings.port, origins["port"]) == (4, "--port")


def test_lists_in_the_environment_have_the_separator_of_their_kind() -> None:
    environ = {"EDGERUN_MODELS": "a,b:c", "EDGERUN_MODEL_REPOSITORY": "/x,y:/z"}
    settings = load(environ=environ).settings
    assert settings.models == ("a", "b:c")
    assert settings.model_repository == ("/x,y", "/z")


def test_home_is_expanded_in_paths_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    settings = load(environ={"EDGERUN_MODEL_REPOSITORY": "~/m", "EDGERUN_MODELS": "~/m"}).settings
    assert settings.model_repository == ("/home/someone/m",)
    assert settings.models == ("~/m",)


def test_socket_defaults_to_the_session_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert Settings().socket_path == Path("/run/user/7/edgerun/edgerun.sock")
    assert Settings(socket="/a.sock").socket_path == Path("/a.sock")


def test_unknown_key_of_a_file_names_the_file_and_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "prot = 1")
    with pytest.raises(ConfigError, match=r"'prot' in .*c\.toml \(did you mean port\?\)"):
        load(path)


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"EDGERUN_MODEL .*did you mean EDGERUN_MODELS\?"):
        load(environ={"EDGERUN_MODEL": "a"})


def test_variable_of_the_native_libraries_is_not_ours_to_judge() -> None:
    assert load(environ={"EDGERUN_NATIVE_DIR": "/somewhere", "EDGERUN_PORT": ""}).settings == Settings()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('port = "80"', "port in .* is '80'; it must be a whole number"),
        ("port = true", "whole number"),
        ("port = 65536", "0 to 65535"),
        ("num_threads = -1", "0 or more"),
        ("engine_step_timeout_s = 0", "1 or more"),
        ("host = 1", "must be a string"),
        ('models = "a"', "must be a list of strings"),
        ("models = [1]", "must be a list of strings"),
        ('log_level = "warn"', "did you mean warning"),
        ("port = ", "not valid TOML"),
    ],
)
def test_unusable_value_names_its_source_and_what_is_right(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path / "c.toml", text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load(path)
    assert str(path) in caught.value.message


def test_word_for_a_number_in_the_environment_fails() -> None:
    with pytest.raises(ConfigError, match="EDGERUN_PORT is 'many'"):
        load(environ={"EDGERUN_PORT": "many"})


def test_file_named_by_the_user_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(config_file=tmp_path / "absent.toml", environ={}, files=[])


def test_every_setting_says_what_it_means() -> None:
    assert all(item.metadata["help"] for item in fields(Settings))
