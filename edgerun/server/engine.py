"""What the server asks of the engine client: the seam between HTTP and the engine process.

`edgerun.engine.client.EngineClient` is the one real implementation; tests put a scripted one in its place.
All methods belong to the event loop's thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Literal, Protocol

from edgerun.engine.messages import Inferred, Loaded, Progress, Stats, TokenOutput
from edgerun.repository.spec import ModelSpec
from edgerun.text.prompt import Prompt

EngineState = Literal["starting", "ready", "restarting", "stopped"]


class Generation(Protocol):
    """One accepted request. Iterating ends after the output with a finish_reason, or raises EngineLost."""

    @property
    def num_prompt_tokens(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    def take_all(self) -> list[TokenOutput]:
        """What has arrived meanwhile, without waiting: a slow reader catches up in one write."""

    def cancel(self) -> None:
        """Free the work within one engine step. Idempotent, safe after the end."""


class Engine(Protocol):
    """The engine process as the server sees it. It outlives crashes: the client starts a new one."""

    @property
    def pid(self) -> int | None: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def trouble(self) -> str:
        """Why a request that comes now will not be answered soon; "" when it will."""

    @property
    def loaded(self) -> Mapping[str, Loaded]: ...

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """End the process; generations that still run raise EngineLost."""

    async def load(
        self, spec: ModelSpec, on_progress: Callable[[Progress], None] | None = None
    ) -> Loaded: ...

    async def unload(self, name: str) -> None: ...

    async def generate(self, model: str, prompt: Prompt) -> Generation:
        """Returns once the prompt is tokenised, fits and is queued.

        Raises ContextLengthExceeded, InvalidRequest, QueueFull, EngineLost. Cancelling the wait aborts.
        """

    async def tokenize(self, model: str, prompt: Prompt) -> list[int]: ...

    async def infer(self, model: str, data: bytes, shape: tuple[int, ...], dtype: str) -> Inferred: ...

    async def stats(self) -> Stats: ...
