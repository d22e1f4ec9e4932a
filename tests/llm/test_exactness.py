"""Through LlmWorker and the real llama.cpp: an answer does not depend on who else asks, on what is cached, or
on a preemption. Where kernels make that impossible, what must hold all the same."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from edgerun.engine.messages import Failed, LlmInfo, LlmStats, Message, Submit, Tokens
from edgerun.errors import ModelNotPulled
from edgerun.llm.llama_api import LlamaLibrary, LlamaModel
from edgerun.llm.loader import load_llm
from edgerun.llm.loop import EngineLoop
from edgerun.llm.step_budget import StepCost
from edgerun.llm.tiny_model import NUM_VOCAB
from edgerun.llm.worker import LlmWorker
from edgerun.repository.repository import default_repository
from edgerun.repository.spec import LlmSettings, ModelSpec
from edgerun.text.prompt import Prompt, SamplingParams

from .other_models import write_recurrent, write_sliding_window
from .test_native_llm import worst_gap

pytestmark = pytest.mark.native


@dataclass(slots=True)
class Answer:
    """num_cached: prompt tokens that the prefix cache gave."""

    tokens: list[int] = field(default_factory=list)
    num_cached: int = 0
    end: str = ""


class Worker:
    """An LlmWorker, asked with token ids. Closing it checks that accounting and llama.cpp agree."""

    def __init__(
        self,
        library: LlamaLibrary,
        path: Path,
        settings: LlmSettings,
        *,
        deterministic: bool = False,
        prefix_cache: bool = True,
    ) -> None:
        spec = ModelSpec("m", "llm", 1, str(path), "", 0, llm=settings)
        loaded = load_llm(
            library,
            spec,
            use_gpu=False,
            num_threads=1,
            deterministic=deterministic,
            prefix_cache=prefix_cache,
        )
        self.info: LlmInfo = loaded.info
        self._replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._fatal: list[BaseException] = []
        self._loop = EngineLoop(self._fatal.append)
        self._loop.start()
        self._worker = LlmWorker(loaded, self._loop, self._take)
        self._num_requests = 0
        self._urgent: list[Submit] = []  # what _take submits after five tokens
        self._num_seen = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._loop.call(self._worker._engine.idle)
        self._worker.close()
        self._loop.stop()
        assert not self._fatal

    def _take(self, reply: Message) -> None:
        self._replies.put(reply)
        self._num_seen += isinstance(reply, Tokens)
        if self._num_seen >= 5 and self._urgent:
            # From the engine thread, between two steps: a submit would come when the answer is over.
            message = self._urgent.pop()
            self._worker._engine.submit(self._worker._request(message, list(message.prompt.token_ids)))

    @property
    def stats(self) -> LlmStats:
        return self._worker.stats()

    def _message(self, prompt: list[int], num_tokens: int, priority: int = 0) -> Submit:
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        message = Prompt(token_ids=tuple(prompt), sampling=sampling, priority=priority)
        return Submit(request_id=self._num_requests, model="m", prompt=message)

    def _collect(self, request_ids: list[int]) -> list[Answer]:
        answers = {request_id: Answer() for request_id in request_ids}
        while not all(answer.end for answer in answers.values()):
            reply = self._replies.get(timeout=30)
            assert not isinstance(reply, Failed), reply
            for output in reply.outputs if isinstance(reply, Tokens) else ():
                answer = answers[output.request_id]
                answer.tokens += output.token_ids
                answer.num_cached, answer.end = output.num_cached_tokens, output.finish_reason or ""
        return list(answers.values())

    def ask(self, prompts: list[list[int]], num_tokens: int = 16) -> list[Answer]:
        """All at once."""
        messages = [self._message(prompt, num_tokens) for prompt in prompts]
        for message in messages:
            self._worker.submit(message)
        return self._collect([message.request_id for message in messages])

    def ask_each(self, prompts: list[list[int]], num_tokens: int = 16) -> list[Answer]:
        """One after the other."""
        return [answer for prompt in prompts for answer in self.ask([prompt], num_tokens)]

    def ask_interrupted(self, prompt: list[int], num_tokens: int, urgent: list[int]) -> Answer:
        """The answer to prompt, whose place a more urgent request takes after some tokens."""
        first, second = self._message(prompt, num_tokens, priority=1), self._message(urgent, 5)
        self._num_seen, self._urgent = 0, [second]
        self._worker.submit(first)
        return self._collect([first.request_id, second.request_id])[0]


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def make_chats(count: int, num_vocab: int) -> list[list[int]]:
    """Prompts of 1 to 120 tokens; every second one begins with the same 61, which are not whole blocks."""
    system = [3 + 7919 * i % (num_vocab - 3) for i in range(61)]
    own = [
        [3 + (104729 * j + 977 * i) % (num_vocab - 3) for j in range(1 + 17 * i % 60)] for i in range(count)
    ]
    return [[*(system if i % 2 == 0 else []), *tokens] for i, tokens in enumerate(own)]


CHATS = make_chats(16, NUM_VOCAB)
URGENT = [9] * 100
SMALL = LlmSettings(max_model_len=256)
ONE_PLACE = replace(SMALL, max_num_seqs=1)


@pytest.fixture(scope="module")
def library(llama_lib_dir: Path) -> LlamaLibrary:
    return LlamaLibrary(llama_lib_dir)


@pytest.fixture
def swapping_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model of 150 kB computing again is as fast as copying: measured times would decide by chance."""
    monkeypatch.setattr(StepCost, "swapping_pays", lambda *_: True)


# ---- deterministic: equal to the bit, so token for token


@pytest.fixture(scope="module")
def alone(library: LlamaLibrary, tiny_gguf: Path) -> list[Answer]:
    """Each of CHATS alone, nothing cached."""
    with Worker(library, tiny_gguf, SMALL, deterministic=True, prefix_cache=False) as worker:
        return worker.ask_each(CHATS)


def test_a_deterministic_model_has_streams_and_no_flash_attention(
    library: LlamaLibrary, tiny_gguf: Path
) -> None:
    with Worker(library, tiny_gguf, SMALL, deterministic=True) as worker:
        info = worker.info
    assert (info.kv_layout, info.flash_attention, info.max_num_seqs) == ("streams", False, 16)
    assert info.prefix_cache


def test_a_crowd_gets_the_answers_of_each_alone(
    library: LlamaLibrary, tiny_gguf: Path, alone: list[Answer]
) -> None:
    with Worker(library, tiny_gguf, SMALL, deterministic=True) as worker:
        crowd = worker.ask(CHATS)
    assert tokens_of(crowd) == tokens_of(alone)
    assert len({tuple(tokens) for tokens in tokens_of(alone)}) > 8, "the answers differ from each other"
    assert [answer.num_cached >= 61 for answer in crowd[2::2]] == [True] * 7, (
        "the common beginning was shared"
    )


def test_a_prefix_hit_gives_the_answer_of_a_miss(
    library: LlamaLibrary, tiny_gguf: Path, alone: list[Answer]
) -> None:
    with Worker(library, tiny_gguf, SMALL, deterministic=True) as worker:
        cold, warm, crowd = worker.ask_each(CHATS), worker.ask_each(CHATS), worker.ask(CHATS[::-1])[::-1]
    assert tokens_of(cold) == tokens_of(warm) == tokens_of(crowd) == tokens_of(alone)
    assert cold[0].num_cached == 0
    for prompt, answer in zip(CHATS, warm, strict=True):
        assert answer.num_cached in ({0} if len(prompt) < 17 else range(16, len(prompt))), "one is computed"


def test_the_next_turn_of_a_chat_is_that_of_a_fresh_worker(library: LlamaLibrary, tiny_gguf: Path) -> None:
    """The first answer was computed token by token, a fresh prompt in one go: only the prompt is reused."""
    with Worker(library, tiny_gguf, SMALL, deterministic=True) as worker:
        (first,) = worker.ask([CHATS[2]], 40)
        turn = [*CHATS[2], *first.tokens, 7, 8, 9]
        (second,) = worker.ask([turn])
    with Worker(library, tiny_gguf, SMALL, deterministic=True, prefix_cache=False) as worker:
        (fresh,) = worker.ask([turn])
    assert 0 < second.num_cached <= len(CHATS[2])
    assert fresh.num_cached == 0
    assert second.tokens == fresh.tokens


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24])
def test_a_preempted_answer_is_that_of_an_uninterrupted_one(
    swap_bytes: int, library: LlamaLibrary, tiny_gguf: Path, swapping_pays: None
) -> None:
    settings = replace(ONE_PLACE, swap_space_bytes=swap_bytes)
    with Worker(library, tiny_gguf, settings, deterministic=True, prefix_cache=False) as worker:
        (uninterrupted,) = worker.ask([CHATS[4]], 60)
        assert worker.stats.preemptions_total == 0
        interrupted = worker.ask_interrupted(CHATS[4], 60, URGENT)
        stats = worker.stats
    assert (stats.preemptions_total, stats.swaps_total) == (1, 1 if swap_bytes else 0)
    assert stats.recomputes_total == (0 if swap_bytes else 1)
    assert interrupted.tokens == uninterrupted.tokens


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24])
def test_a_preempted_answer_is_right_where_its_prompt_was_cached(
    swap_bytes: int, library: LlamaLibrary, tiny_gguf: Path, alone: list[Answer], swapping_pays: None
) -> None:
    settings = replace(ONE_PLACE, swap_space_bytes=swap_bytes)
    with Worker(library, tiny_gguf, settings, deterministic=True) as worker:
        worker.ask([CHATS[4]], 1)
        interrupted = worker.ask_interrupted(CHATS[4], 16, URGENT)
        assert worker.stats.preemptions_total == 1
    assert interrupted.num_cached > 0
    assert interrupted.tokens == alone[4].tokens


# ---- the same with the default model, whose kernels are those of real weights


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return Path(default_repository().resolve("smollm2-135m").path)
    except ModelNotPulled as error:
        pytest.skip(f"needs the default model: {error}")


def test_the_default_model_answers_a_crowd_and_each_alone_the_same(
    library: LlamaLibrary, smollm2: Path
) -> None:
    chats = make_chats(6, 40_000)
    with Worker(library, smollm2, SMALL, deterministic=True) as worker:
        crowd, warm = worker.ask(chats, 8), worker.ask_each(chats[3:], 8)
    with Worker(library, smollm2, SMALL, deterministic=True, prefix_cache=False) as worker:
        alone = worker.ask_each(chats, 8)
    assert tokens_of(crowd) == tokens_of(alone)
    assert tokens_of(warm) == tokens_of(alone[3:])
    assert [answer.num_cached for answer in alone] == [0] * 6
    assert min(crowd[2].num_cached, crowd[4].num_cached, *(answer.num_cached for answer in warm)) > 0


@pytest.mark.parametrize("swap_bytes", [0, 1 << 28])
def test_a_preempted_answer_of_the_default_model_is_that_of_an_uninterrupted_one(
    swap_bytes: int, library: LlamaLibrary, smollm2: Path, swapping_pays: None
) -> None:
    prompt = make_chats(5, 40_000)[4][40:]
    settings = replace(ONE_PLACE, swap_space_bytes=swap_bytes)
    with Worker(library, smollm2, settings, deterministic=True) as worker:
        interrupted = worker.ask_interrupted(prompt, 16, URGENT[:20])
        (uninterrupted,) = worker.ask([prompt], 16)
        stats = worker.stats
    assert (stats.preemptions_total, stats.swaps_total) == (1, 1 if swap_bytes else 0)
    assert interrupted.tokens == uninterrupted.tokens


# ---- what is not deterministic: as near as the kernels allow

# The last logits of these prompts, of a spread of some 10, move by up to 0.16 between chunks of 64 and of 16
# tokens; the best token and the one that was taken may both do so.
POOL_TOLERANCE = 0.35


@pytest.mark.parametrize("flash_attention", ["off", "on"])
def test_in_streams_cold_warm_and_crowd_are_the_same(
    flash_attention: Literal["off", "on"], library: LlamaLibrary, tiny_gguf: Path
) -> None:
    """Cuts, copies and company change nothing in a stream. Only computing an answer again, after a preemption
    or as part of the next prompt, takes other kernels here."""
    settings = replace(SMALL, kv_layout="streams", flash_attention=flash_attention)
    with Worker(library, tiny_gguf, settings) as worker:
        cold, warm, crowd = worker.ask_each(CHATS), worker.ask_each(CHATS), worker.ask(CHATS)
    assert tokens_of(cold) == tokens_of(warm) == tokens_of(crowd)
    assert sum(answer.num_cached for answer in warm) > sum(answer.num_cached for answer in cold)


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24])
@pytest.mark.parametrize("num_kv_tokens", [512, 4096])
def test_in_a_pool_every_token_is_the_best_within_what_kernels_differ_by(
    num_kv_tokens: int, swap_bytes: int, library: LlamaLibrary, tiny_gguf: Path, swapping_pays: None
) -> None:
    """Cells are added up in the order in which they lie in the pool, and what is computed again after a
    preemption takes other kernels, so that near ties may end either way. num_kv_tokens: with and without a
    lack of room."""
    settings = replace(SMALL, kv_layout="unified", num_kv_tokens=num_kv_tokens, swap_space_bytes=swap_bytes)
    with Worker(library, tiny_gguf, settings) as worker:
        answers = [*worker.ask_each(CHATS), *worker.ask(CHATS), *worker.ask(CHATS[::-1])[::-1]]
        stats = worker.stats
    assert (stats.preemptions_total > 0) == (num_kv_tokens == 512)
    assert (stats.swaps_total > 0) == (num_kv_tokens == 512 and swap_bytes > 0)
    assert sum(answer.num_cached for answer in answers) > 0
    model = LlamaModel(library, str(tiny_gguf), use_gpu=False)
    gaps = [worst_gap(model, p, a.tokens) for p, a in zip([*CHATS] * 3, answers, strict=True)]
    stranger = worst_gap(model, CHATS[1], answers[2].tokens)
    model.close()
    assert max(gaps) < POOL_TOLERANCE
    assert stranger > POOL_TOLERANCE, "another request's answer is told apart"


# ---- other kinds of memory


def check_crowds(library: LlamaLibrary, path: Path, settings: LlmSettings) -> LlmStats:
    """In the layout that such a model gets: cold, repeated, together, and too many for the pool."""
    with Worker(library, path, settings, prefix_cache=False) as worker:
        alone = worker.ask_each(CHATS[:8], 60)
        assert worker.stats.preemptions_total == 0
    with Worker(library, path, settings) as worker:
        crowd, warm, again = (
            worker.ask(CHATS[:8], 60),
            worker.ask_each(CHATS[:8], 60),
            worker.ask(CHATS[:8], 60),
        )
        stats = worker.stats
    assert tokens_of(crowd) == tokens_of(alone)
    assert tokens_of(warm) == tokens_of(alone)
    assert tokens_of(again) == tokens_of(alone)
    return stats


@pytest.mark.parametrize("num_kv_tokens", [256, 2048])
def test_a_sliding_window_forgets_and_the_answers_are_right(
    num_kv_tokens: int, library: LlamaLibrary, tmp_path: Path
) -> None:
    write_sliding_window(tmp_path / "window.gguf")
    settings = replace(SMALL, max_num_seqs=4, num_kv_tokens=num_kv_tokens)
    stats = check_crowds(library, tmp_path / "window.gguf", settings)
    assert (stats.preemptions_total > 0) == (num_kv_tokens == 256)
    assert stats.swaps_total == 0, "what a window passed cannot be saved"


def test_a_window_that_was_cut_away_is_no_damage(library: LlamaLibrary, tmp_path: Path) -> None:
    """The tail of a parked answer gives way: what is left has no cell that its window still sees."""
    write_sliding_window(tmp_path / "window.gguf")
    settings = replace(SMALL, max_num_seqs=4, num_kv_tokens=256)
    with Worker(library, tmp_path / "window.gguf", settings) as worker:
        worker.ask([CHATS[0][:60]], 4)
        worker.ask([[9] * 150], 30)
        (cold,) = worker.ask([CHATS[4]], 4)
        (warm,) = worker.ask([CHATS[4]], 4)
        assert warm.tokens == cold.tokens


@pytest.mark.parametrize("swap_bytes", [0, 1 << 24])
@pytest.mark.parametrize("num_kv_tokens", [256, 2048])
def test_a_recurrent_state_survives_company_and_preemption(
    num_kv_tokens: int, swap_bytes: int, library: LlamaLibrary, tmp_path: Path, swapping_pays: None
) -> None:
    write_recurrent(tmp_path / "recurrent.gguf")
    settings = replace(SMALL, max_num_seqs=4, num_kv_tokens=num_kv_tokens, swap_space_bytes=swap_bytes)
    stats = check_crowds(library, tmp_path / "recurrent.gguf", settings)
    assert (stats.preemptions_total > 0) == (num_kv_tokens == 256)
    assert (stats.swaps_total > 0) == (num_kv_tokens == 256 and swap_bytes > 0)
    assert stats.prefix_cache_hits_total == 0


def test_a_recurrent_model_says_why_it_has_no_prefix_cache(library: LlamaLibrary, tmp_path: Path) -> None:
    write_recurrent(tmp_path / "recurrent.gguf")
    with Worker(library, tmp_path / "recurrent.gguf", SMALL) as worker:
        assert not worker.info.prefix_cache
        assert "recurrent" in worker.info.prefix_cache_reason
