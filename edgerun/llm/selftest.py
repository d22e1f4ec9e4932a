"""Does this native build compute on this machine? Run in a child process, for it may crash:

    python -m edgerun.llm.selftest --lib-dir DIR --provider cpu|cuda

loads a tiny model, runs a prompt and a token through it, prints one JSON line {"ok", "detail"} and exits 0 or
1. The probe believes a provider only after this (see edgerun.device).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from edgerun.errors import EdgerunError
from edgerun.llm.llama_api import DECODE_OK, ContextSettings, LlamaContext, LlamaLibrary, LlamaModel
from edgerun.llm.tiny_model import write_tiny_model

_PROMPT_TOKENS = 64  # more than one kernel tile: batched kernels are where miscompiled builds crash


def run(library: LlamaLibrary, *, use_gpu: bool) -> str:
    """What was computed, in words. Raises EdgerunError or ValueError when it is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_tiny_model(path)
        model = LlamaModel(library, str(path), use_gpu=use_gpu)
        try:
            settings = ContextSettings(
                num_kv_tokens=256, max_batch_tokens=_PROMPT_TOKENS, num_seq_ids=1, num_threads=2
            )
            context = LlamaContext(model, settings)
            try:
                _decode(context)
            finally:
                context.close()
        finally:
            model.close()
    return f"a tiny model computed {_PROMPT_TOKENS} tokens at once and one alone"


def _decode(context: LlamaContext) -> None:
    prompt = [3 + i for i in range(_PROMPT_TOKENS)]
    for tokens, start in ((prompt, 0), ([5], _PROMPT_TOKENS)):
        context.batch.clear()
        last = context.batch.add(0, tokens, start, wants_logits=True)
        if context.decode() != DECODE_OK:
            raise ValueError("llama_decode found no room in an empty pool")
        logits = context.logits(last)
        if not np.isfinite(logits).all() or np.ptp(logits) == 0:
            raise ValueError("the logits are not finite or all the same")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m edgerun.llm.selftest")
    parser.add_argument(
        "--lib-dir", default="", help="folder of libllama; empty: inside the llama_cpp package"
    )
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    try:
        library = LlamaLibrary(Path(args.lib_dir) if args.lib_dir else None)
        use_gpu = args.provider != "cpu"
        if use_gpu and not library.supports_gpu_offload():
            raise ValueError("these libraries were built without a GPU backend")
        ok, detail = True, run(library, use_gpu=use_gpu)
    except (EdgerunError, ValueError, RuntimeError) as error:
        ok, detail = False, str(error)
    sys.stdout.write(json.dumps({"ok": ok, "detail": detail}) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
