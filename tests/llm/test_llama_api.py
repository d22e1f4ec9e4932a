"""What only a GPU could show, shown at the native boundary with a fake llama_cpp."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgerun.errors import ModelLoadFailed
from edgerun.llm.llama_api import ALL_LAYERS, LlamaLibrary, LlamaModel


class FakeApi(SimpleNamespace):
    """Loads any path, and logs what llama.cpp logs about its layers."""

    def __init__(self, library: LlamaLibrary, log_line: str | None, handle: int | None = 7) -> None:
        super().__init__()
        self.library, self.log_line, self.handle = library, log_line, handle
        self.params: SimpleNamespace | None = None
        self.freed: list[int] = []

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace(n_gpu_layers=0)

    def llama_model_load_from_file(self, path: bytes, params: SimpleNamespace) -> int | None:
        self.params = params
        if self.log_line is not None:
            self.library._on_log(2, self.log_line.encode(), None)
        return self.handle

    def llama_model_get_vocab(self, handle: int) -> int:
        return 1

    def llama_vocab_n_tokens(self, vocab: int) -> int:
        return 3

    def llama_model_free(self, handle: int) -> None:
        self.freed.append(handle)


def library_with(log_line: str | None, handle: int | None = 7) -> tuple[LlamaLibrary, FakeApi]:
    library = LlamaLibrary.__new__(LlamaLibrary)  # without importing llama_cpp
    library.last_error, library.offloaded_layers = "", None
    library.api = FakeApi(library, log_line, handle)
    return library, library.api


def test_all_layers_on_the_gpu_is_a_load() -> None:
    library, api = library_with("load_tensors: offloaded 31/31 layers to GPU")
    model = LlamaModel(library, "m.gguf", use_gpu=True)
    assert model.num_tokens == 3
    assert api.params is not None
    assert api.params.n_gpu_layers == ALL_LAYERS


@pytest.mark.parametrize(
    ("log_line", "what"),
    [
        ("load_tensors: offloaded 12/31 layers to GPU", "12 of 31 layers"),
        ("load_tensors: offloaded 0/31 layers to GPU", "0 of 31 layers"),
        (None, "no layer"),
    ],
)
def test_layers_left_on_the_cpu_are_refused_loudly(log_line: str | None, what: str) -> None:
    library, api = library_with(log_line)
    with pytest.raises(ModelLoadFailed, match=f"{what} went to the GPU though the GPU was chosen"):
        LlamaModel(library, "m.gguf", use_gpu=True)
    assert api.freed == [7]


def test_on_the_cpu_no_layer_is_offloaded() -> None:
    library, api = library_with(None)
    LlamaModel(library, "m.gguf", use_gpu=False)
    assert api.params is not None
    assert api.params.n_gpu_layers == 0


def test_a_failed_load_repeats_what_llama_cpp_said() -> None:
    library, api = library_with(None, handle=None)
    api.llama_model_load_from_file = lambda path, params: library._on_log(4, b"unknown magic", None)
    with pytest.raises(ModelLoadFailed, match="unknown magic"):
        LlamaModel(library, "m.gguf", use_gpu=False)
