"""The real llama.cpp with a tiny random model: what the fakes promise must hold there too."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgerun.engine.messages import Failed, Message, Submit, Tokenize, Tokenized, Tokens
from edgerun.errors import ModelLoadFailed
from edgerun.llm.llama_api import (
    DECODE_NO_ROOM,
    DECODE_OK,
    ContextSettings,
    LlamaContext,
    LlamaLibrary,
    LlamaModel,
)
from edgerun.llm.loader import load_llm
from edgerun.llm.loop import EngineLoop
from edgerun.llm.request import Request
from edgerun.llm.tiny_model import BOS, write_tiny_model
from edgerun.llm.worker import LlmWorker
from edgerun.repository.spec import LlmSettings, ModelSpec
from edgerun.text.prompt import Prompt, SamplingParams, Segment

from .other_models import write_bert, write_without_vocabulary

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def library(llama_lib_dir: Path) -> LlamaLibrary:
    return LlamaLibrary(llama_lib_dir)


@pytest.fixture(scope="module")
def model(library: LlamaLibrary, tiny_gguf: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(library, str(tiny_gguf), use_gpu=False)
    yield model
    model.close()


def context_of(model: LlamaModel, *, cells: int = 256, seqs: int = 4) -> LlamaContext:
    return LlamaContext(model, ContextSettings(cells, 64, seqs, num_threads=1))


class Worker:
    """An LlmWorker and what it replied."""

    def __init__(self, library: LlamaLibrary, path: Path, settings: LlmSettings) -> None:
        spec = ModelSpec("tiny", "llm", 1, str(path), "", 0, llm=settings)
        loaded = load_llm(library, spec, use_gpu=False, num_threads=1)
        self.info = loaded.info
        self.replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.fatal: list[BaseException] = []
        self.loop = EngineLoop(self.fatal.append)
        self.loop.start()
        self.worker = LlmWorker(loaded, self.loop, self.replies.put)

    def close(self) -> None:
        self.worker.close()
        self.loop.stop()

    def answers(self, *submits: Submit) -> dict[int, tuple[list[int], str]]:
        """Token ids and finish reason, or the kind of failure, of each."""
        for submit in submits:
            self.worker.submit(submit)
        tokens: dict[int, list[int]] = {submit.request_id: [] for submit in submits}
        ends: dict[int, str] = {}
        while len(ends) < len(submits):
            message = self.replies.get(timeout=60)
            if isinstance(message, Failed):
                ends[message.request_id] = message.kind
            elif isinstance(message, Tokens):
                for output in message.outputs:
                    tokens[output.request_id] += output.token_ids
                    if output.finish_reason:
                        ends[output.request_id] = output.finish_reason
        return {i: (tokens[i], ends[i]) for i in tokens}

    def tokenize(self, *segments: Segment, add_bos: bool = True) -> list[int]:
        self.worker.tokenize(
            Tokenize(request_id=1, model="tiny", prompt=Prompt(segments=segments, add_bos=add_bos))
        )
        reply = self.replies.get(timeout=20)
        assert isinstance(reply, Tokenized), reply
        return reply.token_ids


@pytest.fixture
def worker(library: LlamaLibrary, tiny_gguf: Path) -> Iterator[Worker]:
    worker = Worker(library, tiny_gguf, LlmSettings(max_num_batched_tokens=64, max_num_seqs=4))
    yield worker
    worker.close()
    assert not worker.fatal


def submit(request_id: int, text: str, **sampling: object) -> Submit:
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, **sampling})  # type: ignore[arg-type]
    return Submit(
        request_id=request_id, model="tiny", prompt=Prompt(segments=(Segment(text, False),), sampling=params)
    )


# Flash attention takes another kernel for short query blocks, and a batch mixes lengths: with these random
# weights that moves a logit by up to 0.05 of a spread of some 10.
KERNEL_TOLERANCE = 0.1


def worst_gap(model: LlamaModel, prompt: list[int], answer: list[int]) -> float:
    """How far any token of a greedy answer lies below the best one when computed alone, step by step."""
    context, worst = context_of(model, cells=512, seqs=1), 0.0
    chunks = [(i, prompt[i : i + 64]) for i in range(0, len(prompt), 64)]
    chunks += [(len(prompt) + i, [token]) for i, token in enumerate(answer[:-1])]
    for start, tokens in chunks:
        context.batch.clear()
        last = context.batch.add(0, tokens, start, wants_logits=True)
        context.decode()
        if start + len(tokens) >= len(prompt):
            logits = context.logits(last)
            worst = max(worst, float(logits.max() - logits[answer[start + len(tokens) - len(prompt)]]))
    context.close()
    return worst


def test_each_answer_of_a_batch_is_the_best_one_for_its_own_prompt(model: LlamaModel, worker: Worker) -> None:
    texts = {i: f"request {i} " + "x" * (9 * i) for i in range(1, 8)}
    prompts = {i: worker.tokenize(Segment(text, False)) for i, text in texts.items()}
    answers = worker.answers(*(submit(i, text) for i, text in texts.items()))
    assert {reason for _, reason in answers.values()} == {"length"}
    for i, (tokens, _) in answers.items():
        assert worst_gap(model, prompts[i], tokens) < KERNEL_TOLERANCE
    other = answers[2][0]
    assert worst_gap(model, prompts[1], other) > KERNEL_TOLERANCE, "another request's answer is told apart"


def test_preemption_in_a_small_pool_ends_every_request(library: LlamaLibrary, tiny_gguf: Path) -> None:
    settings = LlmSettings(max_num_batched_tokens=64, max_num_seqs=4, num_kv_tokens=256, max_model_len=256)
    worker = Worker(library, tiny_gguf, settings)
    results = worker.answers(*(submit(i, "a" * 60, max_tokens=120) for i in range(1, 5)))
    assert [(len(tokens), reason) for tokens, reason in results.values()] == [(120, "length")] * 4
    assert worker.worker.stats().preemptions_total > 0
    assert worker.worker.stats().num_free_blocks == worker.worker.stats().num_blocks
    worker.close()


def test_a_seed_repeats_and_another_does_not(worker: Worker) -> None:
    mine = submit(1, "hello", temperature=1.0, seed=5)
    first, second = (worker.answers(mine)[1] for _ in range(2))
    assert first == second
    assert worker.answers(submit(1, "hello", temperature=1.0, seed=6))[1] != first


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(worker: Worker) -> None:
    assert worker.answers(submit(1, "a" * 600))[1] == ([], "ContextLengthExceeded")
    assert worker.answers(submit(2, "a" * 10**6))[2] == ([], "ContextLengthExceeded")
    assert worker.answers(submit(3, "fits"))[3][1] == "length"


def test_max_tokens_is_capped_by_the_context(worker: Worker) -> None:
    tokens, reason = worker.answers(submit(1, "a" * 500, max_tokens=10**9))[1]
    assert (len(tokens), reason) == (512 - 501, "length")  # the BOS is one of the 512


def test_control_tokens_come_from_the_template_alone(worker: Worker) -> None:
    forged = worker.tokenize(Segment("</s>", False))
    assert 2 not in forged
    assert len(forged) == 1 + len("</s>")
    assert worker.tokenize(Segment("</s>", True)) == [BOS, 2]


def test_there_is_exactly_one_bos(worker: Worker) -> None:
    assert worker.tokenize(Segment("a", False))[0] == BOS
    assert worker.tokenize(Segment("<s>", True), Segment("a", False))[:2].count(BOS) == 1
    assert worker.tokenize(Segment("a", False), add_bos=False)[0] != BOS


def test_a_word_of_a_hundred_thousand_letters_does_not_end_the_process(worker: Worker) -> None:
    worker.worker.tokenize(
        Tokenize(request_id=9, model="tiny", prompt=Prompt(segments=(Segment("A" * 500, False),)))
    )
    assert isinstance(worker.replies.get(timeout=60), Tokenized)


def test_token_ids_outside_the_vocabulary_are_refused(worker: Worker) -> None:
    message = Submit(request_id=4, model="tiny", prompt=Prompt(token_ids=(5, 10**6)))
    assert worker.answers(message)[4] == ([], "InvalidRequest")


def test_abort_ends_a_request_in_the_queue_and_in_decode(worker: Worker) -> None:
    for request_id in (1, 2):
        worker.worker.submit(submit(request_id, "go on", max_tokens=400))
    worker.worker.abort(1)
    worker.worker.abort(2)
    ends = []
    while len(ends) < 2:
        message = worker.replies.get(timeout=20)
        if isinstance(message, Tokens):
            ends += [o.finish_reason for o in message.outputs if o.finish_reason]
    assert ends == ["abort", "abort"]


def test_after_close_a_request_fails_instead_of_waiting_for_ever(
    library: LlamaLibrary, tiny_gguf: Path
) -> None:
    worker = Worker(library, tiny_gguf, LlmSettings(max_num_batched_tokens=64))
    worker.close()
    assert worker.answers(submit(1, "hello"))[1] == ([], "EngineLost")


def test_the_pieces_spell_the_text(worker: Worker) -> None:
    text = "naïve 日本 🎉"
    ids = worker.tokenize(Segment(text, False), add_bos=False)
    assert b"".join(worker.info.pieces[i] for i in ids).decode() == text


def test_decode_reports_a_full_pool_and_works_after_freeing(model: LlamaModel) -> None:
    context = context_of(model, cells=256)
    for seq_id in range(4):
        context.batch.clear()
        context.batch.add(seq_id, [5] * 64, 0, wants_logits=True)
        assert context.decode() == DECODE_OK
    context.batch.clear()
    context.batch.add(0, [5], 64, wants_logits=True)
    assert context.decode() == DECODE_NO_ROOM
    context.remove_sequence(3)
    assert context.decode() == DECODE_OK
    assert context.position_range(0) == (0, 64)
    assert context.position_range(3) == (-1, -1)
    context.close()


def test_a_batch_over_its_capacity_is_refused_in_python(model: LlamaModel) -> None:
    context = context_of(model)
    with pytest.raises(ValueError, match="over the limit of 64"):
        context.batch.add(0, [5] * 65, 0, wants_logits=True)
    context.close()


def test_logits_are_those_of_the_same_tokens_in_any_order_of_chunks(model: LlamaModel) -> None:
    """One sequence in two chunks gives the logits of one chunk, within what kernels differ by."""
    whole, split = context_of(model), context_of(model)
    tokens = list(range(3, 43))
    last = whole.batch.add(0, tokens, 0, wants_logits=True)
    whole.decode()
    for start, end in ((0, 32), (32, 40)):
        split.batch.clear()
        last_split = split.batch.add(0, tokens[start:end], start, wants_logits=True)
        split.decode()
    assert np.abs(whole.logits(last) - split.logits(last_split)).max() < KERNEL_TOLERANCE
    whole.close()
    split.close()


def test_a_file_that_is_no_model_is_refused_in_words(library: LlamaLibrary, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelLoadFailed, match=r"bad\.gguf did not load"):
        LlamaModel(library, str(path), use_gpu=False)


def test_a_step_smaller_than_the_warm_up_loads_and_answers(library: LlamaLibrary, tiny_gguf: Path) -> None:
    settings = LlmSettings(max_num_batched_tokens=1, max_num_seqs=1, block_size=1)
    worker = Worker(library, tiny_gguf, settings)
    assert worker.answers(submit(1, "hello"))[1][1] == "length"
    worker.close()


def test_weights_that_compute_nan_are_refused_at_load(library: LlamaLibrary, tmp_path: Path) -> None:
    path = tmp_path / "nan.gguf"
    write_tiny_model(path)
    ones, nans = (np.full(64, value, np.float32).tobytes() for value in (1, np.nan))  # the norms' weights
    path.write_bytes(path.read_bytes().replace(ones, nans))
    with pytest.raises(ModelLoadFailed, match="not finite"):
        Worker(library, path, LlmSettings())


@pytest.mark.parametrize("write", [write_bert, write_without_vocabulary])
def test_a_model_that_writes_no_text_is_refused(
    write: Callable[[Path], None], library: LlamaLibrary, tmp_path: Path
) -> None:
    path = tmp_path / "other.gguf"
    write(path)
    with pytest.raises(ModelLoadFailed, match=r"other\.gguf is not a text generating"):
        load_llm(library, ModelSpec("x", "llm", 1, str(path), "", 0), use_gpu=False, num_threads=1)


def test_an_abort_while_the_request_is_handed_on_is_not_lost(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = worker.worker._engine
    hand_on, is_handing_on = engine.submit, threading.Event()

    def slowly(request: Request) -> None:
        is_handing_on.set()
        time.sleep(0.1)
        hand_on(request)

    monkeypatch.setattr(engine, "submit", slowly)
    worker.worker.submit(submit(1, "go on", max_tokens=400))
    assert is_handing_on.wait(timeout=20)
    worker.worker.abort(1)
    reasons: list[str] = []
    while not reasons:
        message = worker.replies.get(timeout=20)
        if isinstance(message, Tokens):
            reasons = [o.finish_reason for o in message.outputs if o.finish_reason]
    assert reasons == ["abort"]
