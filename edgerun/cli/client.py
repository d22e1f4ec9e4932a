"""The HTTP client of the commands: OpenAI's routes and our own, over the server's Unix socket.

`connect` finds the running server, or starts one for this one command. httpx is imported inside functions
so that `edgerun --help` stays instant.
"""

from __future__ import annotations

import json
import mimetypes
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgerun.config import Settings
from edgerun.errors import EdgerunError, EngineLost, InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    import httpx

Message = dict[str, str]

_CONNECT_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 2.0
_MAX_PICTURE_BYTES = 64 << 20  # as edgerun.pixels.image, which is not imported here


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """None: the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    def to_json(self) -> dict[str, int | float]:
        values = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """One event of a streamed answer; usage comes in the last one."""

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models. kind: "llm" or "vision"; provider: None while it is not loaded."""

    name: str
    kind: str
    is_loaded: bool
    is_pulled: bool
    provider: str | None


@dataclass(frozen=True, slots=True)
class Classified:
    """Labels of one picture, best first, as the server wrote them."""

    model: str
    provider: str
    predictions: Sequence[Mapping[str, Any]]
    timing_ms: Mapping[str, float] = field(default_factory=dict)


class ApiClient:
    """Talks to one server; may be used from several threads. Every failure is an EdgerunError."""

    def __init__(self, socket_path: Path) -> None:
        import httpx

        self._socket = socket_path
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket_path)),
            base_url="http://localhost",
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),  # a long prompt may take minutes
            trust_env=False,  # a proxy has no business on a Unix socket
        )

    def close(self) -> None:
        self._http.close()

    def is_alive(self) -> bool:
        import httpx

        # Usually nobody is there; httpcore (1.0.9) leaves the socket of a failed connect open.
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(_HEALTH_TIMEOUT_S)
            try:
                trial.connect(str(self._socket))
            except OSError:
                return False
        try:
            return self._http.get("/health", timeout=_HEALTH_TIMEOUT_S).is_success
        except httpx.TransportError:
            return False

    def device(self) -> dict[str, Any]:
        return self._json("GET", "/v1/device")

    def models(self) -> list[ModelCard]:
        cards = self._json("GET", "/v1/models")["data"]
        return [
            ModelCard(
                name=card["id"],
                kind=card["kind"],
                is_loaded=card["loaded"],
                is_pulled=card["pulled"],
                provider=card["provider"],
            )
            for card in cards
        ]

    def pick_model(self, kind: str, asked: str | None, default: str) -> str:
        """The name to ask for: `asked`; without it `default` if the server has that, else a loaded model.

        A file of weights has a name that the server gave it: then it is the one model that is loaded.
        """
        if asked is not None and not is_weights_file(asked):
            return asked
        cards = [card for card in self.models() if card.kind == kind]
        if asked is None and any(card.name == default for card in cards):
            return default
        for card in sorted(cards, key=lambda card: (not card.is_loaded, not card.is_pulled)):
            return card.name
        raise ModelNotFound(f"the server has no {kind} model; name one with -m, see `edgerun models list`")

    def chat_stream(
        self, model: str, messages: Sequence[Message], options: ChatOptions
    ) -> Generator[ChatChunk, None, None]:
        """The answer as it comes. Closing the iterator cancels the work on the server."""
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options.to_json(),
        }
        with self._translated(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if not response.is_success:
                response.read()
                raise _error_of(response)
            for data in _events(response.iter_bytes()):
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise EngineLost(_message_of(event, "the answer broke off"))
                yield _chunk(event)
        raise EngineLost("the server ended the answer before it was whole; ask again")

    def classify(self, path: Path, *, model: str | None = None, top_k: int | None = None) -> Classified:
        """Labels of one file. Raises EdgerunError with the server's reason for a bad picture."""
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_PICTURE_BYTES + 1)  # /dev/zero has no end
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
        if len(content) > _MAX_PICTURE_BYTES:
            raise InvalidRequest(f"{path} has over {_MAX_PICTURE_BYTES >> 20} MiB, which the server refuses")
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        fields = {"model": model, "top_k": None if top_k is None else str(top_k)}
        answer = self._json(
            "POST",
            "/v1/images/classify",
            files={"file": (path.name.encode(errors="replace").decode(), content, kind)},
            data={name: value for name, value in fields.items() if value is not None},
        )
        row = answer["data"][0]
        if "error" in row:
            raise InvalidRequest(_message_of(row, "the server refused it"))
        return Classified(
            model=answer["model"],
            provider=answer["provider"],
            predictions=row["predictions"],
            timing_ms=row.get("timing_ms", {}),
        )

    def _json(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        with self._translated():
            response = self._http.request(method, path, **arguments)
        if not response.is_success:
            raise _error_of(response)
        answer = response.json()
        assert isinstance(answer, dict)
        return answer

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """httpx's errors as ours."""
        import httpx

        try:
            yield
        except httpx.ConnectError as error:
            raise EdgerunError(
                f"no server answers on unix:{self._socket}; start one with `edgerun serve`"
            ) from error
        except httpx.TransportError as error:
            raise EngineLost(f"the server on unix:{self._socket} went away: {error}; ask again") from error
        except UnicodeEncodeError as error:  # Python keeps such bytes of arguments and files as surrogates
            bad = error.object[error.start : error.end]
            raise InvalidRequest(f"what was typed or piped in is no UTF-8 text: {bad!a}") from error


def is_weights_file(model: str) -> bool:
    """A path instead of a name: names have no slash and no such ending."""
    return "/" in model or model.endswith((".gguf", ".onnx"))


@contextmanager
def connect(settings: Settings, *, models: Sequence[str], no_server: bool = False) -> Iterator[ApiClient]:
    """A client of the running server; without one, or with no_server, of a server for this command alone.

    models: what a server of our own has to load; where one of them is a file, there is always such a server.
    """
    if not no_server and not any(map(is_weights_file, models)):
        with closing(ApiClient(settings.socket_path)) as client:
            if client.is_alive():
                yield client
                return
    from edgerun.server.local import local_server

    with local_server(models=list(models)) as path, closing(ApiClient(Path(path))) as client:
        yield client


def _chunk(event: Mapping[str, Any]) -> ChatChunk:
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return ChatChunk(
        text=delta.get("content") or "",
        finish_reason=choices[0].get("finish_reason"),
        usage=event.get("usage"),
    )


def _events(chunks: Iterator[bytes]) -> Iterator[str]:
    """The data of each server-sent event that is whole.

    Lines end with LF here, as our server writes them. Not response.iter_lines(): it also splits at U+2028 and
    its like, which JSON may hold in a text.
    """
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield event[len(b"data: ") :].decode()


def _error_of(response: httpx.Response) -> EdgerunError:
    try:
        body = response.json()
    except ValueError:
        body = {}
    message = _message_of(body, f"the server answered with status {response.status_code}")
    return EdgerunError(message, status=response.status_code)


def _message_of(body: object, fallback: str) -> str:
    """OpenAI's error object, or a row whose "error" is the text itself."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else fallback
