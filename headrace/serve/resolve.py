"""From a request to what the engine runs (`Submit`) and how its text is made (`TextOptions`)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.engine.messages import GrammarSpec, Submit
from headrace.engine.params import SamplingParams, make_submit
from headrace.errors import RequestError
from headrace.serve.fields import ChatRequest, CompletionRequest, Generation, ResponseFormat
from headrace.text.tokenizer import Tokenizer

FIELD = "structured_outputs"
"""What the engine calls the constraint of a request."""
MAX_SEQUENCES = 4096
"""Prompts times answers of one request."""
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The sampling fields that a checkpoint's generation_config.json may set."""


@dataclass(frozen=True)
class Served:
    """The model as the API knows it. defaults: sampling defaults of the checkpoint."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int
    defaults: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    priorities: bool = False

    def check_name(self, model: str | None) -> None:
        """Raise RequestError 404 for another model's name."""
        if model is not None and model != self.name:
            raise RequestError(
                "model",
                f"the model {model[:200]!r} does not exist; this server serves {self.name!r}",
                code=404,
            )


@dataclass(frozen=True)
class TextOptions:
    """How a choice's tokens become text. logprobs, prompt_logprobs: alternatives to show."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    spaces_between: bool = True
    min_tokens: int = 0
    user_stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    return_ids: bool = False
    keep: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plan:
    """A request, resolved: one submit per prompt, and what the answer looks like."""

    submits: tuple[Submit, ...]
    text: TextOptions
    n: int
    best_of: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    beams: bool
    constraint: str | None

    def named(self, error: RequestError) -> RequestError:
        """The engine's refusal of a constraint, under the name that the client used."""
        if error.field != FIELD or self.constraint is None:
            return error
        text = str(error).replace(FIELD, self.constraint, 1)
        return RequestError(self.constraint, text, error.code)


def constraint_of(request: Generation) -> tuple[str, GrammarSpec] | None:
    """The one constraint of a request and the field that it came in.

    Raises RequestError when there are several, or the form is not known.
    """
    found: dict[str, GrammarSpec] = {}

    def add(name: str, kind: str, value: Any) -> None:
        if value is not None:
            found[name] = GrammarSpec(kind, value if isinstance(value, str) else _json(value))

    if request.response_format is not None:
        spec = _format(request.response_format)
        if spec is not None:
            found["response_format"] = spec
    if (outputs := request.structured_outputs) is not None:
        for kind in ("regex", "choice", "grammar", "structural_tag"):
            add(f"structured_outputs.{kind}", kind, getattr(outputs, kind))
        if outputs.json is not None:
            source = _spaced(outputs.json, outputs.whitespace_pattern)
            found["structured_outputs.json"] = GrammarSpec("json", source)
        elif outputs.whitespace_pattern is not None:
            name = "structured_outputs.whitespace_pattern"
            raise RequestError(name, f"{name}: only with structured_outputs.json")
        if outputs.json_object:
            found["structured_outputs.json_object"] = GrammarSpec("json_object", "")
        if not found:
            raise RequestError("structured_outputs", "structured_outputs: name one constraint")
    for name, kind in (
        ("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice"),
        ("guided_grammar", "grammar"), ("regex", "regex"), ("ebnf", "grammar"),
        ("json_schema", "json"),
    ):  # fmt: skip
        add(name, kind, getattr(request, name))
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(second, f"{second}: {first} already constrains the answer; give one")
    return next(iter(found.items()), None)


FORMAT_MEMBERS = {
    "text": (), "json_object": (), "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers", "format"),
}  # fmt: skip
"""Members of response_format beside its type, by type."""


def _format(given: ResponseFormat) -> GrammarSpec | None:
    for name in ("json_schema", "structures", "triggers", "format"):
        if getattr(given, name) is not None and name not in FORMAT_MEMBERS.get(given.type, (name,)):
            where = f"response_format.{name}"
            raise RequestError(where, f"{where}: not with the type {given.type}")
    if given.type == "text":
        return None
    if given.type == "json_object":
        return GrammarSpec("json_object", "")
    if given.type == "json_schema":
        if given.json_schema is None or given.json_schema.schema is None:
            name = "response_format.json_schema.schema"
            raise RequestError(name, f"{name}: required by the type json_schema")
        return GrammarSpec("json", _json(given.json_schema.schema))
    if given.type == "structural_tag":
        names = ("type", "structures", "triggers", "format")
        members = {name: value for name in names if (value := getattr(given, name)) is not None}
        return GrammarSpec("structural_tag", _json(members))
    raise RequestError(
        "response_format.type",
        f"response_format.type: {given.type[:100]!r} is none of text, json_object, json_schema,"
        " structural_tag",
    )


def _spaced(schema: Any, pattern: str | None) -> str:
    if pattern is None:
        return schema if isinstance(schema, str) else _json(schema)
    try:
        value = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except (msgspec.DecodeError, RecursionError) as error:
        name = "structured_outputs.json"
        raise RequestError(name, f"{name}: not legal JSON: {error}") from None
    from headrace.text.grammar import json_source  # brings llguidance: only where it is needed

    return json_source(value, pattern)


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise RequestError(None, "a schema is nested too deeply") from None


def sampling_of(
    request: Generation, served: Served, max_tokens: int | None, constraint: GrammarSpec | None
) -> SamplingParams:
    """The request's wishes over the checkpoint's defaults. Raises RequestError."""
    given = {
        name: value
        for name in (
            "n", "best_of", "presence_penalty", "frequency_penalty", "seed", "stop",
            "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "skip_special_tokens",
            "include_stop_str_in_output", "logit_bias", "allowed_token_ids", "bad_words",
            "use_beam_search", "length_penalty", "priority", "cache_salt", *DEFAULTS,
        )
        if (value := getattr(request, name)) is not None
    }  # fmt: skip
    for name in DEFAULTS:
        if name not in given and served.defaults.get(name) is not None:
            given[name] = served.defaults[name]
    if isinstance(request, CompletionRequest):
        logprobs = request.logprobs
        if request.echo and logprobs is not None:
            given["prompt_logprobs"] = max(logprobs, request.prompt_logprobs or 0)
    else:
        logprobs = _chat_logprobs(request) if isinstance(request, ChatRequest) else None
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=constraint,
        **given,
    )


def _chat_logprobs(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs", "top_logprobs: needs logprobs to be true")
    return (request.top_logprobs or 0) if request.logprobs else None


def check(request: Generation, served: Served, params: SamplingParams) -> None:
    """Refuse what cannot be honoured together. Raises RequestError naming the field."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options", "stream_options: only with stream true")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        name = "stream_options.continuous_usage_stats"
        raise RequestError(name, f"{name}: needs stream_options.include_usage")
    if request.priority and not served.priorities:
        raise RequestError(
            "priority", "priority: the server was not started with --scheduling-policy priority"
        )
    if request.service_tier not in (None, "auto", "default"):
        raise RequestError("service_tier", "service_tier: only auto and default exist here")
    if request.length_penalty is not None and not params.use_beam_search:
        raise RequestError("length_penalty", "length_penalty: only with use_beam_search")
    if params.use_beam_search and params.stop_strings:
        raise RequestError("stop", "stop: not with use_beam_search (stop_token_ids work)")
    if request.stream:
        if params.use_beam_search:
            raise RequestError("stream", "stream: beam search answers in one piece")
        if params.num_sequences > params.n:
            raise RequestError("best_of", "best_of: more than n cannot be streamed")
        if request.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "prompt_logprobs: not in a streamed answer")


def plan(
    request: Generation, served: Served, prompts: Sequence[Sequence[int]], max_tokens: int | None,
    answer_id: str, tools: tuple[str, str] | None = None, keep: frozenset[int] = frozenset(),
    after: int | None = None,
) -> Plan:  # fmt: skip
    """Resolve a request whose prompts are token ids already.

    tools: (kind, source) of the constraint that its tools mean. keep: control tokens whose text
    must be seen. after: the token after which a constraint begins. Raises RequestError.
    """
    found = constraint_of(request)
    if tools is not None:
        if found is not None:
            raise RequestError(
                "tool_choice", f"tool_choice: calls are constrained, and {found[0]} is another"
            )
        found = ("tools", GrammarSpec(*tools))
    name, constraint = (None, None) if found is None else found
    if constraint is not None and after is not None:
        constraint = msgspec.structs.replace(constraint, after=after)
    params = sampling_of(request, served, max_tokens, constraint)
    check(request, served, params)
    if len(prompts) * params.num_sequences > MAX_SEQUENCES:
        raise RequestError(
            "n",
            f"n: {len(prompts)} prompts with {params.num_sequences} answers each are more than"
            f" {MAX_SEQUENCES} sequences; send several requests",
        )
    now = time.time()
    submits = tuple(
        make_submit(
            f"{answer_id}-{index}", _truncated(prompt, request, served, max_tokens), params,
            served.tokenizer, served.max_model_len, arrival=now, default_seed=served.seed,
        )
        for index, prompt in enumerate(prompts)
    )  # fmt: skip
    options = request.stream_options
    usage = bool(options and options.include_usage)
    text = TextOptions(
        stop=params.stop_strings,
        include_stop=params.include_stop_str_in_output,
        skip_special=params.skip_special_tokens,
        spaces_between=request.spaces_between_special_tokens is not False,
        min_tokens=params.min_tokens,
        user_stop_ids=frozenset(params.stop_token_ids or ()),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        return_ids=bool(request.return_token_ids),
        keep=keep,
    )
    return Plan(
        submits=submits,
        text=text,
        n=params.n,
        best_of=params.num_sequences,
        stream=bool(request.stream),
        include_usage=usage,
        continuous_usage=usage and bool(options and options.continuous_usage_stats),
        beams=params.use_beam_search,
        constraint=name,
    )


def _truncated(
    prompt: Sequence[int], request: Generation, served: Served, max_tokens: int | None
) -> Sequence[int]:
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep > served.max_model_len:
        raise RequestError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens: {keep} is more than the context of {served.max_model_len}",
        )
    if keep == 0:
        raise RequestError("truncate_prompt_tokens", "truncate_prompt_tokens: -1 or at least 1")
    if keep == -1:
        keep = max(1, served.max_model_len - max(1, max_tokens or 1))
    return prompt[-keep:]
