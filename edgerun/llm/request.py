"""A request as the engine holds it: token ids and limits, frozen. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NewType

from edgerun.text.prompt import SamplingParams

RequestId = NewType("RequestId", int)
SeqId = NewType("SeqId", int)  # llama.cpp's sequence id: 0 .. max_num_seqs - 1
BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class Request:
    """num_max_tokens: most tokens to generate, resolved against the context (never None)."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_max_tokens: int
    priority: int
    arrival_s: float  # time.monotonic()
    client: str = ""
    deadline_s: float = math.inf  # time.monotonic() by which it must have ended
