"""Every error edgerun raises on purpose.

EdgerunError                    catch this to catch them all
├── ConfigError                 a setting or a config.toml is wrong
├── ModelError                  about one model; `name` in details
│   ├── ModelNotFound           no such model in the repository
│   ├── ModelNotPulled          known, but its weights are not on this machine yet
│   ├── InvalidModelFile        the file is not a usable model (cut off, HTML, wrong format, too new)
│   ├── ModelLoadFailed         a runtime refused it, or it does not fit
│   └── PullFailed              a download failed
│       └── HashMismatch        what came is not what was asked for
├── DeviceError                 about this machine
│   ├── ProviderUnavailable     the execution provider asked for does not work here
│   └── NativeLibraryMissing    llama.cpp is not built for this machine yet, or an extra is not installed
├── RequestError                the caller's fault; `param` and `code` in details
│   ├── InvalidRequest          a field is missing, malformed or not supported
│   ├── ContextLengthExceeded   prompt longer than the model can take
│   └── InvalidImage            bytes that are no picture we read, or too large
├── QueueFull                   try again after `retry_after_s`
├── DeadlineExceeded            the request was not done by its deadline
├── EngineLost                  the engine process died or is being restarted
└── ServerStartError            address in use, socket of a live server, ...

The message is one sentence a person can act on: what failed, the value seen, what to do.
Errors cross the process boundary as (kind, message, details); see `from_wire`.
"""

from __future__ import annotations

from collections.abc import Mapping

Detail = str | int | float | bool | None


class EdgerunError(Exception):
    """Base of all errors raised on purpose. `details` carries the values that the message names."""

    def __init__(self, message: str, **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Detail] = details


class ConfigError(EdgerunError):
    """A setting or a model's config.toml is wrong."""


class ModelError(EdgerunError):
    """About one model."""


class ModelNotFound(ModelError):
    """No model of that name in any repository on the search path."""


class ModelNotPulled(ModelError):
    """The model is known but its weights are not on this machine."""


class InvalidModelFile(ModelError):
    """The file cannot be a usable model: cut off, of another format, or too new."""


class ModelLoadFailed(ModelError):
    """A runtime refused the model, or it does not fit this device."""


class PullFailed(ModelError):
    """A download failed; what arrived is kept so that the next pull resumes."""


class HashMismatch(PullFailed):
    """The file that arrived is not the file that was asked for."""


class DeviceError(EdgerunError):
    """About this machine."""


class ProviderUnavailable(DeviceError):
    """The execution provider asked for does not work on this device."""


class NativeLibraryMissing(DeviceError):
    """llama.cpp is not built for this machine yet, or the Python extra is not installed."""


class RequestError(EdgerunError):
    """The caller's fault. `details` may hold `param` (the field's name) and `code`."""


class InvalidRequest(RequestError):
    """A field is missing, malformed, out of range or not supported."""


class ContextLengthExceeded(RequestError):
    """The prompt does not fit the model's context; details: num_prompt_tokens, max_model_len."""


class InvalidImage(RequestError):
    """Bytes that are no picture we can read, or one beyond the limits."""


class QueueFull(EdgerunError):
    """The waiting queue is full; details: retry_after_s."""


class DeadlineExceeded(EdgerunError):
    """The request was not done by its own deadline; details: deadline_s."""


class EngineLost(EdgerunError):
    """The engine process died, or is not back yet."""


class ServerStartError(EdgerunError):
    """The server cannot take its address."""


def _subclasses(cls: type[EdgerunError]) -> dict[str, type[EdgerunError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found.update(_subclasses(sub))
    return found


def from_wire(kind: str, message: str, details: Mapping[str, Detail]) -> EdgerunError:
    """The error that the other process raised; an unknown kind becomes a plain EdgerunError."""
    cls = _subclasses(EdgerunError).get(kind, EdgerunError)
    return cls(message, **dict(details))
