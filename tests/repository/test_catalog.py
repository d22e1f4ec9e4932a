"""catalog: which folder defines a model, and which file is a version's."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.errors import ConfigError, ModelNotFound
from edgerun.repository.catalog import Catalog, Inspector, is_safe_name

from .builders import write_gguf, write_onnx, write_shards


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog.of([tmp_path / "extra", tmp_path / "store", tmp_path / "shipped"], tmp_path / "store")


def config(folder: Path, text: str = 'kind = "llm"\n') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(text)
    return folder


def test_first_root_wins(catalog: Catalog, tmp_path: Path) -> None:
    shipped = config(tmp_path / "shipped" / "m")
    assert catalog.folder("m") == shipped
    extra = config(tmp_path / "extra" / "m")
    assert catalog.folder("m") == extra


def test_pulled_weights_do_not_hide_the_shipped_config(catalog: Catalog, tmp_path: Path) -> None:
    shipped = config(tmp_path / "shipped" / "m")
    weights = write_gguf(tmp_path / "store" / "m" / "1" / "model.gguf")
    assert catalog.folder("m") == shipped
    assert catalog.load("m").present() == {1: weights}


def test_a_users_own_config_in_the_store_goes_before_the_shipped(catalog: Catalog, tmp_path: Path) -> None:
    config(tmp_path / "shipped" / "m")
    mine = config(tmp_path / "store" / "m")
    assert catalog.folder("m") == mine


def test_folders_without_config_are_models_in_any_root(catalog: Catalog, tmp_path: Path) -> None:
    write_gguf(tmp_path / "store" / "a" / "1" / "model.gguf")
    write_onnx(tmp_path / "extra" / "b" / "2" / "model.onnx")
    (tmp_path / "extra" / "empty" / "1").mkdir(parents=True)
    assert catalog.names() == ["a", "b"]
    assert catalog.load("a").config.kind == "llm"
    assert catalog.load("b").config.kind == "vision"


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "..", ".", "", "a/b", "/etc", ".hidden", "a\0b", "ä", "x" * 200, "m.gguf", "m.ONNX"],
)
def test_unsafe_names_touch_no_path(catalog: Catalog, name: str) -> None:
    assert not is_safe_name(name)
    with pytest.raises(ModelNotFound):
        catalog.load(name)


def test_nearest_name_is_offered(catalog: Catalog, tmp_path: Path) -> None:
    config(tmp_path / "shipped" / "smollm2-135m")
    with pytest.raises(ModelNotFound, match="did you mean smollm2-135m"):
        catalog.load("smolm2-135")


def test_partial_downloads_are_no_versions(catalog: Catalog, tmp_path: Path) -> None:
    config(tmp_path / "shipped" / "m")
    write_gguf(tmp_path / "store" / "m" / "1" / "model.gguf.partial")
    write_gguf(tmp_path / "store" / "m" / "2" / ".model.gguf")
    assert catalog.load("m").present() == {}


def test_the_only_file_of_a_version_may_have_any_name(catalog: Catalog, tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "extra" / "m" / "1" / "my model.gguf")
    assert catalog.load("m").present() == {1: weights}
    write_gguf(tmp_path / "extra" / "m" / "1" / "other.gguf")
    with pytest.raises(ConfigError, match=r"my model\.gguf, other\.gguf"):
        catalog.load("m")


def test_shard_set_is_one_version(catalog: Catalog, tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "extra" / "m" / "1")
    assert catalog.load("m").present() == {1: paths[0]}


def test_two_formats_need_a_config(catalog: Catalog, tmp_path: Path) -> None:
    write_gguf(tmp_path / "extra" / "m" / "1" / "model.gguf")
    write_onnx(tmp_path / "extra" / "m" / "1" / "model.onnx")
    with pytest.raises(ConfigError, match=r"write a config\.toml"):
        catalog.load("m")


def test_inspector_reads_again_only_what_changed(tmp_path: Path) -> None:
    inspect = Inspector()
    path = write_gguf(tmp_path / "m.gguf", metadata={"general.architecture": "one"})
    first = inspect(path)
    assert inspect(path) is first
    write_gguf(path, metadata={"general.architecture": "another"})
    assert inspect(path) is not first
