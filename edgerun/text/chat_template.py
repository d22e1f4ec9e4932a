"""Messages to prompt text through the model's own Jinja template, in a sandbox.

Owns two guarantees. A template, which is a stranger's code that came with a model file, reaches nothing
but its arguments. And a user's text never becomes a control token: only what the template itself wrote is
handed on as special (see shield). Knows no token ids and no HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgerun.errors import InvalidRequest, ModelLoadFailed
from edgerun.text.prompt import Segment
from edgerun.text.shield import Shield

MessageLike = Mapping[str, object]
Origin = Literal["model", "chatml", "plain"]

# Far above any conversation, far below what hurts: messages of one request, and characters of one prompt.
_MAX_RANGE = 10_000
_MAX_PROMPT_CHARS = 16_000_000

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


class Rendered(msgspec.Struct, frozen=True):
    """One prompt. add_bos: the tokenizer has to put the model's BOS in front; the template did not."""

    segments: tuple[Segment, ...]
    add_bos: bool

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


class ChatTemplate:
    """A model's chat template, compiled once; `render` may be called from any thread.

    origin says which template is in use: "model" is the one of the model file. Where the file has none it
    is "chatml" if the model knows `<|im_start|>`, else "plain": lines of `role: content`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_text: str,
        eos_text: str,
        special_texts: Sequence[str],
        add_bos: bool,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """source: Jinja text, "" for none. bos_text, eos_text: "" where the model has none.

        special_texts: texts of all control tokens. add_bos: whether this model's prompts begin with BOS.
        now: the clock behind `strftime_now`. Raises ModelLoadFailed if the source is no valid Jinja.
        """
        self.origin: Origin = "model"
        if not source.strip():
            self.origin = "chatml" if "<|im_start|>" in special_texts else "plain"
            source = _CHATML if self.origin == "chatml" else _PLAIN
        self._bos_text = bos_text
        self._eos_text = eos_text
        self._add_bos = add_bos
        self._shield = Shield((*special_texts, bos_text, eos_text), reserved=source)
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadFailed(
                f"the model's chat template is not valid Jinja, line {error.lineno}: {_one_line(error)}; "
                "get a newer file of this model"
            ) from error

    def render(
        self,
        messages: Sequence[MessageLike],
        *,
        tools: Sequence[MessageLike] | None = None,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """The prompt for `messages`, whose contents are strings; role `developer` acts as `system`.

        Raises InvalidRequest with the template's own words where it refuses them.
        """
        shielded = self._shield.cover((list(map(_plain_role, messages)), tools))
        covered_messages, covered_tools = shielded.value
        text = self._run(
            messages=covered_messages,
            tools=covered_tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._bos_text,
            eos_token=self._eos_text,
        )
        segments = shielded.split(text)
        return self._with_one_bos(segments)

    def _run(self, **variables: object) -> str:
        """The one place where a template's code runs."""
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(**variables):
                parts.append(part)
                num_chars += len(part)
                if num_chars > _MAX_PROMPT_CHARS:
                    raise jinja2.TemplateRuntimeError(f"it writes more than {_MAX_PROMPT_CHARS} characters")
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {_one_line(error)}", param="messages"
            ) from error
        except Exception as error:  # a stranger's code may raise anything; none of it may take us down
            what = f"{type(error).__name__}: {_one_line(error)}"
            raise InvalidRequest(
                f"the model's chat template fails on these messages: {what}", param="messages"
            ) from error
        return "".join(parts)

    def _with_one_bos(self, segments: tuple[Segment, ...]) -> Rendered:
        """Drop all but one of the BOS that the template wrote in front, and say whether one is missing."""
        bos = Segment(self._bos_text, special=True)
        start = 0
        while start < len(segments) and not segments[start].special and segments[start].text.isspace():
            start += 1
        if start == len(segments) or segments[start] != bos:
            return Rendered(segments, self._add_bos)
        while start < len(segments) and segments[start] == bos:
            start += 1
        return Rendered((bos, *segments[start:]), add_bos=False)


def exercise(template: ChatTemplate) -> list[str]:
    """Render the usual orders of roles; one line for each that the template refuses, [] when it takes all."""
    failures = []
    for name, roles in _ROLE_ORDERS.items():
        messages = [{"role": role, "content": f"text {index}"} for index, role in enumerate(roles.split())]
        try:
            template.render(messages)
        except InvalidRequest as error:
            failures.append(f"{name}: {error.message}")
    return failures


_ROLE_ORDERS = {
    "one question": "user",
    "system first": "system user",
    "a second question": "user assistant user",
    "system late": "user system user",
    "system alone": "system",
    "two users in a row": "user user",
    "assistant first": "assistant user",
    "tool result": "user assistant tool",
}


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training text in some templates: the body as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The variables, filters and options that Hugging Face's apply_chat_template gives to a template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]  # text of any length from a small number, of use to no template
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: now().strftime(format),
        range=_limited_range,
    )
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateRuntimeError(str(message))


def _limited_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > _MAX_RANGE:
        raise jinja2.TemplateRuntimeError(f"range of {len(numbers)} numbers; at most {_MAX_RANGE}")
    return numbers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's: Jinja's own filter escapes `<`, `>` and `&` for HTML, which models never saw."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain_role(message: MessageLike) -> MessageLike:
    """OpenAI's newer name of the system role, which few templates know."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
