"""Which models this server answers for, and loading one when it is first asked for.

Owns the mapping from a name in a request to a model that is loaded and ready. Does not know HTTP, nor how
files are fetched (repository) or run (engine).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from edgerun.device.providers import require
from edgerun.device.report import DeviceReport
from edgerun.engine.messages import LlmInfo, Loaded, Progress, VisionInfo
from edgerun.errors import InvalidRequest, ModelLoadFailed, ModelNotFound, ModelNotPulled, PullFailed
from edgerun.repository.repository import ModelEntry, Repository
from edgerun.repository.spec import ModelKind, ModelSpec
from edgerun.server.engine import Engine
from edgerun.server.jobs import Job, Jobs, ReportProgress
from edgerun.text.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

DEFAULT_MODELS = ("smollm2-135m", "efficientnet-lite0")

# A name from a request must never act as a path: the repository also takes paths, but only a person at
# the command line may name one.
_NAME = re.compile(r"[^/\\\x00-\x1f]{1,200}")
_ROUTES = {"llm": "POST /v1/chat/completions", "vision": "POST /v1/images/classify"}


@dataclass(frozen=True, slots=True)
class ReadyLlm:
    """A loaded language model and what is needed to speak with it."""

    spec: ModelSpec
    loaded: Loaded
    info: LlmInfo
    template: ChatTemplate


@dataclass(frozen=True, slots=True)
class ReadyVision:
    """A loaded vision model."""

    spec: ModelSpec
    loaded: Loaded
    info: VisionInfo


Ready = ReadyLlm | ReadyVision
Model = TypeVar("Model", ReadyLlm, ReadyVision)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One line of the model list. max_model_len is None while an LLM is not loaded and does not set it."""

    name: str
    kind: ModelKind
    task: str
    description: str
    version: int
    size_bytes: int
    is_pulled: bool
    is_loaded: bool = False
    provider: str | None = None  # really in use; None while it is not loaded
    max_model_len: int | None = None


class ModelManager:
    """Used from the event loop only; what touches the disk runs in worker threads."""

    def __init__(self, repository: Repository, engine: Engine, device: DeviceReport) -> None:
        self._repository = repository
        self._engine = engine
        self._device = device
        self._jobs = Jobs()
        self._only: dict[str, ModelSpec] | None = None  # what --model named, in that order; None: everything
        self._ready: dict[str, Ready] = {}
        self._is_closing = False

    async def fetch(self, name: str, on_progress: ReportProgress) -> ModelSpec:
        """The spec of a model that a person named, pulled if its weights are missing.

        name: also the path of a weights file. Never for a name from a request.
        """
        try:
            return await asyncio.to_thread(self._repository.resolve, name)
        except ModelNotPulled:
            entry = await asyncio.to_thread(self._repository.get, name)
            require(self._device, entry.kind, entry.require, name)  # before a download for nothing
            return await asyncio.to_thread(self._repository.pull, name, self._stoppable(on_progress))

    def serve_only(self, specs: Sequence[ModelSpec]) -> None:
        """Answer for these models alone from now on."""
        self._only = {spec.name: spec for spec in specs}

    def close(self) -> None:
        """Stop running pulls at their next report; what arrived is kept and the next pull resumes."""
        self._is_closing = True

    def _stoppable(self, report: ReportProgress) -> ReportProgress:
        def pass_on(stage: str, done: int, total: int) -> None:
            if self._is_closing:
                raise PullFailed("the server is stopping; the next pull goes on where this one stopped")
            report(stage, done, total)

        return pass_on

    async def cards(self) -> list[ModelCard]:
        if self._only is not None:
            return [self._live(_card_of_spec(spec)) for spec in self._only.values()]
        entries = await asyncio.to_thread(self._repository.list)
        return [self._live(_card_of_entry(entry)) for entry in entries]

    async def card(self, name: str) -> ModelCard:
        """Raises ModelNotFound."""
        if self._only is not None:
            return self._live(_card_of_spec(self._served_spec(name)))
        return self._live(_card_of_entry(await self._entry(name)))

    # ---- models for requests

    async def llm(self, name: str) -> ReadyLlm:
        """The language model `name`, loaded if it was not yet.

        Raises ModelError, ProviderUnavailable, EngineLost, and InvalidRequest for a model of another kind.
        """
        return _of_kind(await self._acquire(name), ReadyLlm, name)

    async def vision(self, name: str) -> ReadyVision:
        return _of_kind(await self._acquire(name), ReadyVision, name)

    async def default_name(self, kind: ModelKind) -> str:
        """The model of `kind` that a request without a name means: a loaded one first, else the first listed.

        Raises InvalidRequest when there is none.
        """
        cards = [card for card in await self.cards() if card.kind == kind and card.is_pulled]
        defaults = DEFAULT_MODELS if self._only is None else ()
        cards.sort(key=lambda card: (not card.is_loaded, card.name not in defaults))
        if not cards:
            what = "language" if kind == "llm" else "vision"
            raise InvalidRequest(
                f"name a model: this server has no {what} model to fall back on", param="model"
            )
        return cards[0].name

    async def _acquire(self, name: str) -> Ready:
        ready = self._ready.get(name)
        loaded = self._engine.loaded.get(name)
        if ready is not None and (loaded is ready.loaded or self._engine.state == "restarting"):
            # While the engine restarts its list is incomplete, but it takes the request and keeps it waiting.
            return ready
        if ready is not None and loaded is not None:
            return self._keep(ready.spec, loaded)  # loaded again after a crash
        loaded_now = await self._load_job(await self._known(name)).result()
        assert isinstance(loaded_now, ReadyLlm | ReadyVision)
        return loaded_now

    # ---- acts of the model routes and of the server's start

    async def load(self, name: str, on_progress: ReportProgress | None = None) -> None:
        """Load the version that is current now, also when another one is loaded."""
        await (await self.start_load(name)).result(on_progress)

    async def start_load(self, name: str) -> Job:
        return self._load_job(await self._known(name))

    async def start_pull(self, name: str) -> Job:
        """Fetch the weights. A served model that is loaded stays as it is until it is loaded again."""
        known = await self._known(name)

        async def pull(report: ReportProgress) -> None:
            await asyncio.to_thread(self._repository.pull, known, self._stoppable(report))

        return self._jobs.join("pull", known, pull)

    async def start_rollback(self, name: str) -> Job:
        """Go back one version, and load it where the model is loaded."""
        known = await self._known(name)

        async def rollback(report: ReportProgress) -> None:
            await asyncio.to_thread(self._repository.rollback, known)
            if self._only is not None:
                self._only[known] = await asyncio.to_thread(self._repository.resolve, known)
            if known in self._engine.loaded:
                await self._load(known, report)

        return self._jobs.join("rollback", known, rollback)

    async def start_unload(self, name: str) -> Job:
        """Free the memory. The next request for the model loads it again."""
        known = await self._known(name)

        async def unload(report: ReportProgress) -> None:
            if known in self._engine.loaded:
                await self._engine.unload(known)
            self._ready.pop(known, None)

        return self._jobs.join("unload", known, unload)

    # ---- loading

    def _load_job(self, name: str) -> Job:
        return self._jobs.join("load", name, lambda report: self._load(name, report))

    async def _load(self, name: str, report: ReportProgress) -> Ready:
        spec = await asyncio.to_thread(self._resolve, name)
        require(self._device, spec.kind, spec.require, spec.name)

        def pass_on(progress: Progress) -> None:
            report(progress.stage, progress.done, progress.total)

        ready = self._keep(spec, await self._engine.load(spec, pass_on))
        logger.info("model %s version %d is loaded", spec.name, spec.version)
        return ready

    def _resolve(self, name: str) -> ModelSpec:
        if self._only is not None and name in self._only:
            return self._only[name]
        return self._repository.resolve(name)

    def _keep(self, spec: ModelSpec, loaded: Loaded) -> Ready:
        self._ready[spec.name] = ready = _ready(spec, loaded)
        return ready

    # ---- names

    async def _known(self, name: str) -> str:
        """`name`, if this server answers for it. Raises ModelNotFound."""
        if self._only is not None:
            return self._served_spec(name).name
        return (await self._entry(name)).name

    def _served_spec(self, name: str) -> ModelSpec:
        served = self._only or {}
        if name not in served:
            names = ", ".join(served)
            raise ModelNotFound(
                f"no model {_shown(name)} is served here; there is: {names}", name=_shown(name)
            )
        return served[name]

    async def _entry(self, name: str) -> ModelEntry:
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise ModelNotFound(
                f"no model {_shown(name)}; GET /v1/models lists what there is", name=_shown(name)
            )
        return await asyncio.to_thread(self._repository.get, name)

    # ---- cards

    def _live(self, card: ModelCard) -> ModelCard:
        """The card with what the engine says of the model now."""
        loaded = self._engine.loaded.get(card.name)
        if loaded is None:
            return card
        max_model_len = loaded.llm.max_model_len if loaded.llm else None
        return replace(
            card,
            version=loaded.version,
            is_loaded=True,
            provider=loaded.provider,
            max_model_len=max_model_len,
        )


def _card_of_spec(spec: ModelSpec) -> ModelCard:
    return ModelCard(
        name=spec.name,
        kind=spec.kind,
        task="chat" if spec.kind == "llm" else spec.vision.task,
        description="",
        version=spec.version,
        size_bytes=spec.size_bytes,
        is_pulled=True,
        max_model_len=spec.llm.max_model_len or None,
    )


def _card_of_entry(entry: ModelEntry) -> ModelCard:
    return ModelCard(
        name=entry.name,
        kind=entry.kind,
        task=entry.task,
        description=entry.description or entry.error,
        version=entry.active_version,
        size_bytes=entry.size_bytes,
        is_pulled=entry.is_pulled,
    )


def _ready(spec: ModelSpec, loaded: Loaded) -> Ready:
    if loaded.llm is not None:
        info = loaded.llm
        template = ChatTemplate(
            info.chat_template,
            bos_text=info.bos_text,
            eos_text=info.eos_text,
            special_texts=info.special_texts,
            add_bos=info.add_bos,
        )
        return ReadyLlm(spec, loaded, info, template)
    if loaded.vision is not None:
        return ReadyVision(spec, loaded, loaded.vision)
    raise ModelLoadFailed(f"the engine loaded {spec.name} but says neither what it reads nor what it answers")


def _of_kind(ready: Ready, wanted: type[Model], name: str) -> Model:
    if isinstance(ready, wanted):
        return ready
    kind, route = ready.spec.kind, _ROUTES[ready.spec.kind]
    what = "a language model" if kind == "llm" else "a vision model"
    raise InvalidRequest(f"{name} is {what}: use {route}", param="model")


def _shown(name: str) -> str:
    """A stranger's name, fit for a message."""
    return repr(name if len(name) <= 80 else name[:80] + "...")
