"""The one home of llama.cpp: a typed, small face over llama-cpp-python's low-level API.

Owns native handles and the translation of native failures into edgerun errors. Does not know requests,
scheduling or sampling. Struct layouts move with every llama.cpp release, so the version is pinned exactly in
pyproject.toml.

llama.cpp ends the whole process over some mistakes; llama_batch and llama_sequences check for them before.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgerun.errors import InvalidRequest, ModelLoadFailed, NativeLibraryMissing
from edgerun.llm.llama_batch import Batch
from edgerun.llm.llama_sequences import LlamaSequences
from edgerun.repository.spec import KvCacheDtype

logger = logging.getLogger(__name__)

ALL_LAYERS = 999  # n_gpu_layers: more than any model has
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_GGML_LOG_WARN, _GGML_LOG_ERROR = 3, 4  # enum ggml_log_level in ggml.h; 5 continues a line
_GGML_DEVICE_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU in ggml-backend.h; one that shares main memory is IGPU
# What llama.cpp warns of at each load: a unified pool is longer than one sequence may be, and see swa_full.
_ON_PURPOSE = ("n_ctx_seq", "full-size SWA cache")
_NO_VOCABULARY = 0  # LLAMA_VOCAB_TYPE_NONE in llama.h: llama.cpp aborts the process when asked for its words
NOT_GENERATING = "is not a text generating (decoder-only) model"
# enum ggml_type in ggml.h
_GGML_TYPES: dict[KvCacheDtype, int] = {"f16": 1, "q8_0": 8, "q4_0": 2}


MAX_SEQ_IDS = 256  # LLAMA_MAX_SEQ in llama-cparams.h
STREAM_MULTIPLE = 256  # llama.cpp rounds the cells of a stream up to this (GGML_PAD in llama-context.cpp)

# What a model keeps of what it has read. window: some layers look back a fixed number of tokens only.
# recurrent: a state of fixed size, which cannot be cut back. hybrid: layers of both kinds.
MemoryKind = Literal["plain", "window", "recurrent", "hybrid"]


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """num_kv_tokens: cells of the pool, of all streams together where each sequence has its own.
    max_batch_tokens: most tokens of one decode. num_seq_ids: sequences that may hold cells, at most 256."""

    num_kv_tokens: int
    max_batch_tokens: int
    num_seq_ids: int
    num_threads: int
    kv_cache_dtype: KvCacheDtype = "f16"
    unified: bool = True
    flash_attention: bool = True


class LlamaLibrary:
    """libllama from one folder. One per process: llama-cpp-python binds its library at import."""

    def __init__(self, lib_dir: Path | None) -> None:
        """lib_dir: the folder of a native flavour; None takes the libraries inside the llama_cpp package.

        Raises NativeLibraryMissing when the extra is not installed or the library does not load.
        """
        if lib_dir is not None:
            os.environ["LLAMA_CPP_LIB_PATH"] = str(lib_dir)
        try:
            import llama_cpp
        except ImportError as error:
            raise NativeLibraryMissing(
                f"llama-cpp-python is not installed ({error}); run: pip install 'edgerun[cpu]'"
            ) from error
        except (OSError, RuntimeError) as error:
            raise NativeLibraryMissing(
                f"llama.cpp's library in {lib_dir or 'the llama_cpp package'} does not load: {error}; "
                "run: edgerun native ensure"
            ) from error
        self.api: Any = llama_cpp
        self._lib_dir = lib_dir
        self.last_error = ""
        self.offloaded_layers: tuple[int, int] | None = None
        # The callback must stay referenced as long as the library may log, else the process crashes.
        self._log_callback = self.api.llama_log_callback(self._on_log)
        self.api.llama_log_set(self._log_callback, None)
        if lib_dir is not None:
            self._load_backends(lib_dir)
        self.api.llama_backend_init()

    def _on_log(self, level: int, text: bytes | None, _user_data: object) -> None:
        line = (text or b"").decode("utf-8", "replace").strip()
        if not line:
            return
        if found := _OFFLOADED.search(line):
            self.offloaded_layers = (int(found[1]), int(found[2]))
        if level == _GGML_LOG_ERROR:
            self.last_error = line
        is_problem = level in (_GGML_LOG_WARN, _GGML_LOG_ERROR) and not any(w in line for w in _ON_PURPOSE)
        logger.log(logging.WARNING if is_problem else logging.DEBUG, "llama.cpp: %s", line)

    def _load_backends(self, lib_dir: Path) -> None:
        """A portable build keeps its CPU variants in libraries of their own, which ggml picks among."""
        if not any(lib_dir.glob("libggml-cpu-*.so")):
            return
        ggml = ctypes.CDLL(str(lib_dir / "libggml.so"))
        load_all = ggml.ggml_backend_load_all_from_path
        load_all.argtypes, load_all.restype = [ctypes.c_char_p], None
        load_all(str(lib_dir).encode())

    def supports_gpu_offload(self) -> bool:
        return bool(self.api.llama_supports_gpu_offload())

    def gpu_free_bytes(self) -> int | None:
        """Free memory of the first GPU that has its own; None where there is none such, or it is not told.

        llama-cpp-python does not bind these functions of ggml-backend.h.
        """
        folder = self._lib_dir or Path(self.api.__file__).parent / "lib"
        try:
            ggml = ctypes.CDLL(str(folder / "libggml.so"))
            ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
            ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
            ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
            ggml.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
            size_pointer = ctypes.POINTER(ctypes.c_size_t)
            ggml.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size_pointer, size_pointer]
            ggml.ggml_backend_dev_memory.restype = None
        except (OSError, AttributeError) as error:
            logger.debug("ggml does not tell the memory of its devices: %s", error)
            return None
        for i in range(ggml.ggml_backend_dev_count()):
            device = ggml.ggml_backend_dev_get(i)
            if ggml.ggml_backend_dev_type(device) == _GGML_DEVICE_GPU:
                free, total = ctypes.c_size_t(), ctypes.c_size_t()
                ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
                return free.value or None
        return None


class LlamaModel:
    """Weights and vocabulary of one GGUF. Tokenising is safe from any thread."""

    def __init__(
        self,
        library: LlamaLibrary,
        path: str,
        *,
        use_gpu: bool,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Raises ModelLoadFailed with llama.cpp's own words, or when the layers did not go to the GPU."""
        api = library.api
        params = api.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS if use_gpu else 0
        keep_alive = None
        if on_progress is not None:
            keep_alive = api.llama_progress_callback(lambda share, _data: (on_progress(share), True)[1])
            params.progress_callback = keep_alive
        library.last_error, library.offloaded_layers = "", None
        handle = api.llama_model_load_from_file(os.fsencode(path), params)
        del keep_alive
        if not handle:
            reason = library.last_error or "llama.cpp gave no reason"
            raise ModelLoadFailed(f"{path} did not load: {reason}", path=path)
        self._library, self._api, self.handle, self.path = library, api, handle, path
        self.vocab = api.llama_model_get_vocab(handle)
        self.num_tokens: int = api.llama_vocab_n_tokens(self.vocab)
        if use_gpu:
            self._check_offload()

    def _check_offload(self) -> None:
        """Asked for the GPU: every layer must be there, else say so instead of running on the CPU."""
        got = self._library.offloaded_layers
        if got is not None and got[0] == got[1]:
            return
        self.close()
        what = "no layer" if got is None else f"{got[0]} of {got[1]} layers"
        raise ModelLoadFailed(
            f"{self.path}: {what} went to the GPU though the GPU was chosen; the native libraries may lack "
            "this GPU's architecture or its memory is full. Run: edgerun doctor",
            path=self.path,
        )

    def close(self) -> None:
        if self.handle:
            self._api.llama_model_free(self.handle)
            self.handle = None

    # ---- facts

    def metadata(self, key: str) -> str:
        """A GGUF metadata value as text, "" where absent."""
        size = 1024
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self._api.llama_model_meta_val_str(self.handle, key.encode(), buffer, size)
            if length < 0:
                return ""
            if length < size:
                return buffer.value.decode("utf-8", "replace")
            size = length + 1

    def chat_template(self) -> str:
        text: bytes | None = self._api.llama_model_chat_template(self.handle, None)
        return (text or b"").decode("utf-8", "replace")

    def trained_context(self) -> int:
        return int(self._api.llama_model_n_ctx_train(self.handle))

    def size_bytes(self) -> int:
        return int(self._api.llama_model_size(self.handle))

    def is_generating(self) -> bool:
        """Whether it may write text: no encoder, and a vocabulary. LlamaContext refuses the rest."""
        api = self._api
        if api.llama_vocab_type(self.vocab) == _NO_VOCABULARY:
            return False
        return bool(api.llama_model_has_decoder(self.handle)) and not bool(
            api.llama_model_has_encoder(self.handle)
        )

    def memory_kind(self) -> MemoryKind:
        api = self._api
        if api.llama_model_is_hybrid(self.handle):
            return "hybrid"
        if api.llama_model_is_recurrent(self.handle):
            return "recurrent"
        return "window" if api.llama_model_n_swa(self.handle) > 0 else "plain"

    def kv_bytes_per_token(self, dtype: KvCacheDtype) -> int:
        """K and V of all layers for one token: an upper bound where some layers keep no full attention; 0
        where none keeps anything for a token."""
        if self.memory_kind() == "recurrent":
            return 0
        api, model = self._api, self.handle
        heads = max(1, api.llama_model_n_head(model))
        width = api.llama_model_n_embd(model) // heads * max(1, api.llama_model_n_head_kv(model))
        # bytes per value: q8_0 and q4_0 keep a 2-byte scale for each 32 values (ggml-common.h)
        per_value = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}[dtype]
        return int(2 * api.llama_model_n_layer(model) * width * per_value)

    # ---- words

    def bos(self) -> int:
        return int(self._api.llama_vocab_bos(self.vocab))

    def eos(self) -> int:
        return int(self._api.llama_vocab_eos(self.vocab))

    def adds_bos(self) -> bool:
        return bool(self._api.llama_vocab_get_add_bos(self.vocab))

    def end_tokens(self) -> list[int]:
        """Every token that ends a generation (EOS, end of turn, ...)."""
        return [t for t in range(self.num_tokens) if self._api.llama_vocab_is_eog(self.vocab, t)]

    def token_text(self, token: int) -> str:
        """The vocabulary's text of a token, "" for none (-1)."""
        if token < 0:
            return ""
        return bytes(self._api.llama_vocab_get_text(self.vocab, token) or b"").decode("utf-8", "replace")

    def control_texts(self) -> list[str]:
        """Texts of the control tokens: a template may write them, a user may not."""
        api = self._api
        # LLAMA_TOKEN_ATTR_CONTROL 1<<3 and USER_DEFINED 1<<4 (llama.h): both are matched by special parsing
        special = (1 << 3) | (1 << 4)
        found = (
            self.token_text(t)
            for t in range(self.num_tokens)
            if api.llama_vocab_get_attr(self.vocab, t) & special
        )
        return [text for text in found if text]

    def pieces(self) -> list[bytes]:
        """The bytes of each token; b"" for control tokens."""
        api, vocab = self._api, self.vocab
        size = 256
        buffer = ctypes.create_string_buffer(size)
        out: list[bytes] = []
        for token in range(self.num_tokens):
            length = api.llama_token_to_piece(vocab, token, buffer, size, 0, False)
            if length < 0:  # the piece is longer: -length bytes
                size = -length
                buffer = ctypes.create_string_buffer(size)
                length = api.llama_token_to_piece(vocab, token, buffer, size, 0, False)
            out.append(buffer.raw[:length])
        return out

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Ids of text. special: control tokens written in it count as such. Adds no BOS."""
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 16
        ids = (self._api.llama_token * capacity)()
        count = self._api.llama_tokenize(self.vocab, data, len(data), ids, capacity, False, special)
        if count < 0:
            raise InvalidRequest(f"the tokenizer failed on a text of {len(data)} bytes")
        return list(ids[:count])


DECODE_OK, DECODE_NO_ROOM = 0, 1  # return codes of llama_decode (llama.h)


class LlamaContext(LlamaSequences):
    """One KV cache and its compute buffers. Only its owner's thread may call it."""

    def __init__(self, model: LlamaModel, settings: ContextSettings) -> None:
        """Raises ModelLoadFailed when the cache or the buffers do not fit."""
        api = model._api
        params = api.llama_context_default_params()
        params.n_ctx = settings.num_kv_tokens
        params.n_batch = params.n_ubatch = settings.max_batch_tokens
        params.n_seq_max = settings.num_seq_ids
        params.n_threads = params.n_threads_batch = settings.num_threads
        params.type_k = params.type_v = _GGML_TYPES[settings.kv_cache_dtype]
        params.kv_unified = settings.unified
        params.flash_attn_type = 1 if settings.flash_attention else 0
        # Else a sliding window keeps few cells, and nearly every shared prefix would lack its beginning.
        params.swa_full = True
        params.no_perf = True
        handle = api.llama_init_from_model(model.handle, params)
        if not handle:
            reason = model._library.last_error or "llama.cpp gave no reason"
            raise ModelLoadFailed(
                f"{model.path}: a KV cache of {settings.num_kv_tokens} tokens did not fit ({reason}); "
                "lower max_model_len or num_kv_tokens in the model's config.toml",
                path=model.path,
            )
        super().__init__(api, handle, num_seq_ids=settings.num_seq_ids, unified=settings.unified)
        self.settings, self._row = settings, ctypes.c_float * model.num_tokens
        if not self._memory:  # BERT and its kind, and diffusion models: nothing is kept to continue from
            self.close()
            raise ModelLoadFailed(f"{model.path} {NOT_GENERATING}", path=model.path)
        self.batch = Batch(api, settings.max_batch_tokens)

    def close(self) -> None:
        if self.handle:
            self._api.llama_free(self.handle)
            self.handle = None

    def set_num_threads(self, num_threads: int) -> None:
        self._api.llama_set_n_threads(self.handle, num_threads, num_threads)

    def decode(self) -> int:
        """Run self.batch. DECODE_OK, or DECODE_NO_ROOM: nothing was written, free some cells and retry.

        Raises RuntimeError on any other code, after which the context is not to be trusted.
        """
        self._in_scratch = None
        code = int(self._api.llama_decode(self.handle, self.batch.native))
        if code not in (DECODE_OK, DECODE_NO_ROOM):
            raise RuntimeError(f"llama_decode returned {code} for {self.batch.native.n_tokens} tokens")
        return code

    def logits(self, batch_index: int) -> NDArray[np.float32]:
        """(vocabulary,) float32: a view on llama.cpp's buffer, valid until the next decode."""
        pointer = self._api.llama_get_logits_ith(self.handle, batch_index)
        # np.ctypeslib.as_array makes a type each time: 40 us, against 3 us for this.
        row: Any = self._row.from_address(ctypes.addressof(pointer.contents))
        view: NDArray[np.float32] = np.frombuffer(row, dtype=np.float32)
        return view
