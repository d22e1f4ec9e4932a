"""What crosses to the engine for one chat or completion: frozen, plain data.

Knows nothing of templates (see chat_template) nor of token ids: text is tokenised in the engine.
"""

from __future__ import annotations

import msgspec


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of rendered text. Only `special` ones, which the template wrote, may become control tokens."""

    text: str
    special: bool


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's names and meanings. temperature 0 is greedy; top_k 0 or -1 is off; seed None is random."""

    max_tokens: int | None = None  # None: as far as the context reaches
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the server hands it over.

    add_bos: whether the tokenizer may add the model's BOS (not where the template wrote it already; the
    engine never adds a second one).
    """

    segments: tuple[Segment, ...] = ()
    token_ids: tuple[int, ...] = ()  # instead of segments: already tokenised
    add_bos: bool = True
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    priority: int = 0  # lower goes first, as in vLLM
    client: str = ""  # who asks: the scheduler shares the model fairly between clients
    deadline_s: float = 0.0  # seconds from its arrival at the engine in which it must be done; 0: none
