"""The OpenAI chat request as this server takes it, checked field by field.

Rules: a field that we honour is validated here, in its documented range; one that we do not honour is
refused by name, unless its value says "off" or it cannot change the answer. Field names and ranges are
those of the OpenAI API reference; the extra sampling fields are vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from edgerun.repository.spec import SamplingDefaults
from edgerun.text.prompt import SamplingParams

MAX_STOPS = 16  # OpenAI allows 4, vLLM any number
_MAX_STOP_CHARS = 1000
_MAX_MESSAGES = 10_000  # what a template may loop over; checking 150 000 held up the event loop for 1.4 s
_MAX_INT32 = 2**31 - 1  # "as many as fit": any larger wish means the same, and must cross as one integer


def _whole_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise PydanticCustomError("text", "is not valid Unicode: half of a surrogate pair") from None
    return text


def only(*allowed: object) -> AfterValidator:
    """For a field that we do not honour: null and `allowed` are fine, all else is refused by name."""

    def check(value: Any) -> Any:
        # `is` keeps 0 and False apart, which are equal in Python.
        if value is None or any(value == one and type(value) is type(one) for one in allowed):
            return value
        raise PydanticCustomError("unsupported", "is not supported by this version of edgerun; leave it out")

    return AfterValidator(check)


Text = Annotated[str, AfterValidator(_whole_text)]


class Strict(BaseModel):
    """No coercion ("1" is no number, 1 is no text), no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: Text


def _as_parts(content: Any) -> Any:
    """A text is one part. Pictures get a message of their own, as that is what people try."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise PydanticCustomError("content", "must be a text or a list of parts")
    for part in content or ():
        if isinstance(part, dict) and part.get("type") in ("image_url", "input_image", "image"):
            raise PydanticCustomError(
                "content",
                "holds a picture; language models here read text only, see POST /v1/images/classify",
            )
    return content


Content = Annotated[
    list[TextPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None)
]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(Strict):
    """One message. What an assistant message of ours or OpenAI's carries beside its text may come back."""

    role: Role
    content: Content = None
    name: Text | None = None
    tool_call_id: Text | None = None
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    tool_calls: Annotated[Any, only([])] = None
    reasoning_content: Annotated[Any, only()] = None

    def for_template(self) -> dict[str, str]:
        """As chat templates read it: parts joined, `developer` acting as `system` (OpenAI's own rule)."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": "".join(part.text for part in self.content or ())}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _has_content(message: ChatMessage) -> ChatMessage:
    # Only an assistant may have said nothing: that is how clients send back a message without text.
    if message.role != "assistant" and not message.content:
        raise PydanticCustomError("content", "needs a content: a text or at least one text part")
    return message


Messages = Annotated[
    list[Annotated[ChatMessage, AfterValidator(_has_content)]], Field(min_length=1, max_length=_MAX_MESSAGES)
]


def _stop_list(stop: Any) -> Any:
    """Null and empty texts ask for nothing: an empty stop text would end every answer at once."""
    if stop is None:
        return []
    found = [stop] if isinstance(stop, str) else stop
    return [one for one in found if one != ""] if isinstance(found, list) else found


def _max_tokens(value: int | None) -> int | None:
    """-1 is llama.cpp's "no limit"."""
    if value is None or value == -1:
        return None
    if value < 1:
        raise PydanticCustomError("max_tokens", "must be at least 1 (or -1: as far as the context reaches)")
    return min(value, _MAX_INT32)


def _bias(value: dict[str, float] | None) -> dict[str, float] | None:
    for key, bias in (value or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 9):
            raise PydanticCustomError("logit_bias", "keys must be token ids")
        if not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "values must be from -100 to 100")
    return value


def _between(low: float, high: float) -> Any:
    return Field(ge=low, le=high)


MaxTokens = Annotated[int | None, AfterValidator(_max_tokens)]
Penalty = Annotated[float, _between(-2, 2)]
StopList = Annotated[
    list[Annotated[Text, Field(max_length=_MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_stop_list, json_schema_input_type=str | list[str] | None),
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class SamplingFields(Strict):
    """Sampling fields that chat shares with the other routes that generate text. Null means the default."""

    max_tokens: MaxTokens = None
    temperature: Annotated[float, _between(0, 2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_bias)] = None
    seed: int | None = None
    stop: StopList = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # vLLM's extras
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, _between(0, 1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    priority: Annotated[int, Field(ge=-_MAX_INT32, le=_MAX_INT32)] | None = None
    # How it is scheduled; neither changes the answer.
    user: Text | None = None  # whose turn it is: the model is shared fairly between users
    # Our own: milliseconds from the request's arrival in which its answer must be complete.
    deadline_ms: Annotated[int, Field(ge=1, le=_MAX_INT32)] | None = None

    def token_limit(self) -> int | None:
        return self.max_tokens

    def sampling_params(self, defaults: SamplingDefaults) -> SamplingParams:
        """defaults: the model's own, for what the request does not say."""
        return SamplingParams(
            max_tokens=self.token_limit(),
            temperature=_or(self.temperature, defaults.temperature),
            top_k=min(_or(self.top_k, defaults.top_k), _MAX_INT32),
            top_p=_or(self.top_p, defaults.top_p),
            min_p=_or(self.min_p, defaults.min_p),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            # Any integer is a seed; what crosses to the engine has 63 bits.
            seed=None if self.seed is None else self.seed % 2**63,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            ignore_eos=bool(self.ignore_eos),
            min_tokens=min(_or(self.min_tokens, 0), _MAX_INT32),
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


_Ignored = Annotated[Any, Field(description="accepted and without effect")]


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    model: Text
    messages: Messages
    max_completion_tokens: MaxTokens = None

    # Cannot change the answer.
    metadata: _Ignored = None
    store: _Ignored = None
    service_tier: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None
    prompt_cache_retention: _Ignored = None
    prediction: _Ignored = None
    parallel_tool_calls: _Ignored = None

    # Would change it, and are not honoured yet.
    n: Annotated[Any, only(1)] = None
    logprobs: Annotated[Any, only(False)] = None
    top_logprobs: Annotated[Any, only(0)] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    verbosity: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: Any) -> int | None:
        other = info.data.get("max_tokens")
        if value is not None and other is not None and value != other:
            raise PydanticCustomError("max_tokens", "says another number than max_tokens; send one of them")
        return value

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(Strict):
    """Body of POST /tokenize, in vLLM's shape: `prompt` or `messages`."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: Annotated[Any, only(False)] = None


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: Text | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
