"""Every model that ships with edgerun has a config its own parser takes, and weights that can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.repository.config_file import read_config
from edgerun.repository.repository import Repository

SHIPPED = Path(__file__).parents[2] / "models"
CONFIGS = sorted(SHIPPED.glob("*/config.toml"))


def test_both_default_models_ship() -> None:
    assert {"smollm2-135m", "efficientnet-lite0"} <= {path.parent.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_the_config_says_what_the_model_is_and_under_which_licence(path: Path) -> None:
    config = read_config(path)

    assert config.description
    assert config.license
    assert config.homepage.startswith("https://")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_every_version_is_pinned_and_can_be_had(path: Path) -> None:
    config = read_config(path)

    assert config.versions
    for version in config.versions:
        assert len(version.sha256) == 64
        assert version.size_bytes > 0
        beside = path.parent / str(version.version) / version.file
        assert version.sources or beside.is_file()


def test_the_shipped_classifier_is_ready_in_place(tmp_path: Path) -> None:
    repository = Repository([SHIPPED], store=tmp_path)
    spec = repository.resolve("efficientnet-lite0")

    assert spec.path == str(SHIPPED / "efficientnet-lite0" / "1" / "model.onnx")
    assert (spec.kind, spec.version, len(spec.labels)) == ("vision", 1, 1000)
    assert spec.vision.preprocess.in_graph
    assert (spec.vision.output, spec.vision.embedding_output) == ("logits", "embedding")
