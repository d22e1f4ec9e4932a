"""config_file: what is right is typed, what is wrong names file, key and the nearest valid one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from edgerun.errors import ConfigError
from edgerun.paths import shipped_models_dir
from edgerun.repository.config_file import (
    _RANGES,
    FileSource,
    HuggingFaceSource,
    ModelConfig,
    UrlSource,
    WheelSource,
    parse_config,
    read_config,
)

VERSION = '[[versions]]\nversion = 1\nfile = "model.gguf"\n'


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "m/config.toml")
    assert caught.value.message.startswith("m/config.toml")
    return caught.value


def test_a_full_config_becomes_typed() -> None:
    config = parse_config(
        """
        kind = "llm"
        require = "gpu"
        [llm]
        max_model_len = 2048
        kv_cache_dtype = "q8_0"
        [version_policy]
        specific = [1, 2]
        [[versions]]
        version = 2
        file = "model.gguf"
        size_bytes = 10
        sources = [
          {type = "huggingface", repo = "a/b", filename = "c.gguf"},
          {type = "wheel", package = "p", version = "1.0", member = "p/c.gguf"},
          {type = "url", url = "https://host/c.gguf"},
          {type = "file", path = "/c.gguf"},
        ]
        """,
        "f",
    )
    assert (config.kind, config.require) == ("llm", "gpu")
    assert (config.llm.max_model_len, config.llm.kv_cache_dtype) == (2048, "q8_0")
    assert config.version_policy.specific == (1, 2)
    assert config.versions[0].sources == (
        HuggingFaceSource(repo="a/b", filename="c.gguf"),
        WheelSource(package="p", version="1.0", member="p/c.gguf"),
        UrlSource(url="https://host/c.gguf"),
        FileSource(path="/c.gguf"),
    )


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ('knd = "llm"', "knd", "did you mean kind?"),
        ('kind = "llm"\n[llm]\nmax_modl_len = 1', "llm.max_modl_len", "did you mean llm.max_model_len?"),
        (
            'kind = "vision"\n[vision.preprocess]\nwidht_px = 1',
            "vision.preprocess.widht_px",
            "did you mean vision.preprocess.width_px?",
        ),
        ('kind = "llm"\n[llm]\nqqq = 1', "llm.qqq", "max_num_seqs"),
        ('kind = "lm"', "kind", "one of: llm, vision"),
        ('require = "gpu"', "kind", "is missing; one of: llm, vision"),
        ('kind = "vision"\n[vision.preprocess]\nlayout = "NCWH"', "vision.preprocess.layout", "NCHW, NHWC"),
        ('kind = "llm"\n[llm]\nmax_num_seqs = "8"', "llm.max_num_seqs", "expected `int`"),
        ('kind = "llm"\n[llm]\nmax_num_seqs = true', "llm.max_num_seqs", "expected `int`"),
        ('kind = "llm"\n[vision]\n', "vision", "takes no [vision]"),
        ('kind = "llm"\n[version_policy]\nlatest = 1\nspecific = [1]', "version_policy", "not both"),
        ('kind = "llm"\n[version_policy]\nspecific = []', "version_policy.specific", "no version"),
        ('kind = "vision"\n[vision.preprocess]\nstd = [1, 0, 1]', "vision.preprocess.std", "divided"),
        ('kind = "vision"\n[vision.preprocess]\nmean = [nan, 0, 1]', "vision.preprocess", "finite"),
        ('kind = "vision"\n[vision.preprocess]\nstd = [1, 2]', "vision.preprocess.std", "length 3"),
        (f'kind = "llm"\n{VERSION}{VERSION}', "versions[1].version", "twice"),
        ('kind = "llm"\n[[versions]]\nversion = 0', "versions[0].version", "from 1"),
        (
            'kind = "llm"\n[[versions]]\nversion = 1\nfile = "../m.gguf"',
            "versions[0].file",
            "plain file name",
        ),
        ('kind = "llm"\n[[versions]]\nversion = 1\nfile = ".m.gguf"', "versions[0].file", "plain file name"),
        ('kind = "llm"\n[[versions]]\nversion = 1\nfile = "m.onnx"', "versions[0].file", ".gguf"),
        (f'kind = "llm"\n{VERSION}sha256 = "ABC"', "versions[0].sha256", "64 hexadecimal"),
        (f'kind = "llm"\n{VERSION}size_bytes = -1', "versions[0].size_bytes", "negative"),
        (f'kind = "llm"\n{VERSION}sources = [{{type = "whel"}}]', "versions[0].sources.type", "wheel"),
        (
            f'kind = "llm"\n{VERSION}sources = [{{type = "url", ulr = "x"}}]',
            "versions[0].sources[0].ulr",
            "did you mean versions[0].sources[0].url?",
        ),
        (
            f'kind = "llm"\n{VERSION}sources = [{{type = "url", url = "ftp://x"}}]',
            "versions[0].sources[0].url",
            "https://",
        ),
        (
            f'kind = "llm"\n{VERSION}sources = [{{type = "wheel", package = "--index-url", version = "1",'
            ' member = "a"}]',
            "versions[0].sources[0].package",
            "letters",
        ),
        (
            'kind = "llm"\n[[versions]]\nversion = 1\nfile = "m-00001-of-00002.gguf"\n'
            'sources = [{type = "url", url = "https://x"}]',
            "versions[0].sources",
            "split model",
        ),
    ],
)
def test_errors_name_the_key(text: str, key: str, words: str) -> None:
    error = refused(text)
    assert error.details["key"] == key
    assert key in error.message
    assert words in error.message


def test_broken_toml_names_the_place() -> None:
    assert "line 2" in refused('kind = "llm"\nx ==').message


@pytest.mark.parametrize("key", sorted(_RANGES))
def test_every_range_refuses_what_is_just_outside(key: str) -> None:
    least, most, is_open = _RANGES[key]
    kind = "vision" if key.startswith("vision") else "llm"
    table, _, name = key.rpartition(".")

    def text(value: float) -> str:
        return f'kind = "{kind}"\n[{table}]\n{name} = {value}'

    assert refused(text(least if is_open else least - 1)).details["key"] == key
    assert refused(text(most + 1)).details["key"] == key
    parse_config(text(most), "f")


def test_every_number_setting_has_a_range() -> None:
    """A setting that is added later must be thought about here too."""

    def numbers(value: Any, where: str) -> list[str]:
        found = []
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if dataclasses.is_dataclass(item):
                found += numbers(item, f"{where}{field.name}.")
            elif isinstance(item, (int, float)) and not isinstance(item, bool):
                found.append(f"{where}{field.name}")
        return found

    assert sorted(numbers(ModelConfig("llm"), "")) == sorted(_RANGES)


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_config(path)


def test_shipped_configs_are_valid_and_checked_by_hash() -> None:
    root = shipped_models_dir()
    assert root is not None
    paths = sorted(root.glob("*/config.toml"))
    assert "smollm2-135m" in {path.parent.name for path in paths}
    for path in paths:
        config = read_config(path)
        assert config.license
        assert all(version.sha256 and version.size_bytes for version in config.versions)
