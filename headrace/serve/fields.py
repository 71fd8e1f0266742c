"""The request bodies of the API, field by field: type, range and meaning.

The description of a field is its documentation: it stands in /openapi.json and in docs/api.md. Null
means absent everywhere, so every optional field is `X | None`. A field that is not here is refused
by name. Ranges are checked while the body is decoded; what needs the model (vocabulary, context)
is checked in `resolve`.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_MESSAGES = 10_000
"""Messages of a conversation; each has at least one token, so more would not fit a context."""


def _doc(text: str) -> Meta:
    return Meta(description=text)


TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, Meta(max_length=4096)]
Word = Annotated[str, Meta(max_length=128)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: Annotated[
        bool | None, _doc("one more chunk before the end, without choices, holds the usage")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, _doc("every chunk holds the usage so far (needs include_usage)")
    ] = None


class JsonSchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The `json_schema` member of a response format."""

    name: Annotated[str | None, _doc("a name; no effect")] = None
    description: Annotated[str | None, _doc("a description; no effect")] = None
    schema: Annotated[dict[str, Any] | bool | None, _doc("the JSON schema to obey")] = None
    strict: Annotated[bool | None, _doc("no effect: the schema is always obeyed")] = None


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """What form the answer takes."""

    type: Annotated[str, _doc("text, json_object, json_schema or structural_tag")]
    json_schema: Annotated[JsonSchemaFormat | None, _doc("for the type json_schema")] = None
    structures: Annotated[list[Any] | None, _doc("for the type structural_tag")] = None
    triggers: Annotated[list[str] | None, _doc("for the type structural_tag")] = None
    format: Annotated[dict[str, Any] | None, _doc("for the type structural_tag")] = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the answer; exactly one member besides `whitespace_pattern`."""

    json: Annotated[dict[str, Any] | str | bool | None, _doc("a JSON schema")] = None
    regex: Annotated[str | None, _doc("the whole answer matches this pattern")] = None
    choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None, _doc("the answer is one of these")
    ] = None
    grammar: Annotated[str | None, _doc("a Lark or GBNF grammar")] = None
    json_object: Annotated[bool | None, _doc("any JSON object")] = None
    structural_tag: Annotated[str | dict[str, Any] | None, _doc("a structural tag")] = None
    whitespace_pattern: Annotated[
        str | None, _doc("with json: the white space between the parts, as a pattern")
    ] = None


class Generation(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions share."""

    model: Annotated[str | None, _doc("name of the served model; another name is 404")] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _doc("most tokens to generate; completions: 16, chat: the rest of the context"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=100)] | None,
        _doc("0 is greedy (ties to the lowest id); default 1"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        _doc("keep the shortest prefix of probabilities that sums to this"),
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        _doc("keep the k likeliest tokens; 0 or -1: all"),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        _doc("drop tokens below this share of the likeliest one"),
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        _doc("the same seed gives the same answer"),
    ] = None
    n: Annotated[Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None, _doc("number of answers")] = (
        None
    )
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        _doc("generate this many, return the n with the best mean log-probability"),
    ] = None
    stream: Annotated[bool | None, _doc("send the answer as server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, _doc("see StreamOptions")] = None
    stop: Annotated[
        Text | Annotated[list[Text], Meta(max_length=64)] | None,
        _doc("end before the first of these strings; at most 64 of 4096 characters"),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=1024)] | None,
        _doc("token ids that end the answer"),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, _doc("keep the stop string, or the text of the stop token")
    ] = None
    ignore_eos: Annotated[bool | None, _doc("end-of-sequence tokens do not end the answer")] = None
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=2**31 - 1)] | None,
        _doc("nothing ends the answer before this many tokens"),
    ] = None
    presence_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None, _doc("subtracted from tokens already generated")
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, Meta(ge=-2, le=2)] | None,
        _doc("subtracted per earlier generation of a token"),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        _doc("divides positive and multiplies negative logits of all seen tokens"),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[int, Bias], Meta(max_length=1024)] | None,
        _doc("token id to a value added to its logit, -100 to 100"),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=500_000)] | None,
        _doc("only these ids may be generated"),
    ] = None
    bad_words: Annotated[
        Annotated[list[Word], Meta(max_length=256)] | None,
        _doc("words whose token sequences are never completed; at most 256 of 128 characters"),
    ] = None
    prompt_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        _doc("log-probabilities of the prompt, with this many alternatives"),
    ] = None
    use_beam_search: Annotated[
        bool | None, _doc("beam search; the width is best_of or n; not streamed")
    ] = None
    length_penalty: Annotated[
        Annotated[float, Meta(ge=-10, le=10)] | None,
        _doc("beam scores are divided by length to this power"),
    ] = None
    skip_special_tokens: Annotated[bool | None, _doc("leave special tokens out of text")] = None
    spaces_between_special_tokens: Annotated[
        bool | None, _doc("a space between special tokens shown as text")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        _doc("keep the last N prompt tokens; -1: what the context holds beside max_tokens"),
    ] = None
    add_special_tokens: Annotated[
        bool | None, _doc("add the model's begin token; completions: true, chat: false")
    ] = None
    response_format: Annotated[ResponseFormat | None, _doc("see ResponseFormat")] = None
    structured_outputs: Annotated[StructuredOutputs | None, _doc("see StructuredOutputs")] = None
    guided_json: Annotated[
        dict[str, Any] | str | bool | None, _doc("old name of structured_outputs.json")
    ] = None
    guided_regex: Annotated[str | None, _doc("old name of structured_outputs.regex")] = None
    guided_choice: Annotated[
        Annotated[list[str], Meta(min_length=1)] | None,
        _doc("old name of structured_outputs.choice"),
    ] = None
    guided_grammar: Annotated[str | None, _doc("old name of structured_outputs.grammar")] = None
    regex: Annotated[str | None, _doc("SGLang's name of structured_outputs.regex")] = None
    ebnf: Annotated[str | None, _doc("SGLang's name of structured_outputs.grammar")] = None
    json_schema: Annotated[
        dict[str, Any] | str | None, _doc("SGLang's name of structured_outputs.json")
    ] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None,
        _doc("lower is served first; needs --scheduling-policy priority"),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1024)] | None,
        _doc("prompts share cached prefixes only under the same salt"),
    ] = None
    request_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        _doc("becomes part of the id of the answer"),
    ] = None
    return_token_ids: Annotated[
        bool | None, _doc("add token_ids and prompt_token_ids to the answer")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, _doc("name tokens as token_id:N in log-probabilities")
    ] = None
    service_tier: Annotated[str | None, _doc("auto or default; no effect")] = None
    user: Annotated[str | None, _doc("accepted; no effect")] = None
    safety_identifier: Annotated[str | None, _doc("accepted; no effect")] = None
    prompt_cache_key: Annotated[str | None, _doc("accepted; no effect")] = None
    metadata: Annotated[dict[str, Any] | None, _doc("accepted; no effect")] = None
    store: Annotated[bool | None, _doc("accepted; no effect: nothing is stored")] = None


class CompletionRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        _doc("a text, a list of texts, token ids, or a list of lists of token ids"),
    ]
    echo: Annotated[bool | None, _doc("put the prompt before the answer")] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        _doc("log-probabilities with this many alternatives a token"),
    ] = None
    suffix: Annotated[
        Annotated[str, Meta(max_length=0)] | None,
        _doc("only empty: the model cannot fill in the middle"),
    ] = None


class ContentPart(Struct, kw_only=True, forbid_unknown_fields=True):
    """One part of a message: text."""

    type: Annotated[str, _doc("text (or refusal, in an assistant message)")]
    text: Annotated[str | None, _doc("the text")] = None
    refusal: Annotated[str | None, _doc("the text of a refusal")] = None


class FunctionCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """The function of a past tool call."""

    name: Annotated[str, Meta(min_length=1), _doc("name of the function")]
    arguments: Annotated[
        str | dict[str, Any] | None, _doc("a JSON object, as text or as it is")
    ] = None


class ToolCall(Struct, kw_only=True, forbid_unknown_fields=True):
    """A past tool call of the assistant."""

    id: Annotated[str | None, _doc("id of the call")] = None
    type: Annotated[str | None, _doc("function")] = None
    index: Annotated[int | None, _doc("accepted; no effect")] = None
    function: Annotated[FunctionCall, _doc("the call")]


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Annotated[str, _doc("system, developer, user, assistant or tool")]
    content: Annotated[
        str | Annotated[list[ContentPart], Meta(min_length=1, max_length=10_000)] | None,
        _doc("text, or text parts, which are joined with line breaks"),
    ] = None
    name: Annotated[str | None, _doc("handed to the chat template")] = None
    tool_calls: Annotated[list[ToolCall] | None, _doc("calls that the assistant made")] = None
    tool_call_id: Annotated[str | None, _doc("the call that a tool message answers")] = None
    reasoning: Annotated[str | None, _doc("handed to the chat template")] = None
    reasoning_content: Annotated[str | None, _doc("another name of reasoning")] = None
    refusal: Annotated[str | None, _doc("accepted; no effect")] = None
    annotations: Annotated[list[Any] | None, _doc("accepted; no effect")] = None


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$"), _doc("its name")]
    description: Annotated[str | None, _doc("handed to the chat template")] = None
    parameters: Annotated[dict[str, Any] | None, _doc("JSON schema of its arguments")] = None
    strict: Annotated[bool | None, _doc("no effect: forced calls always obey the schema")] = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions exist."""

    type: Annotated[str, _doc("function")]
    function: Annotated[FunctionTool, _doc("the function")]


class ToolName(Struct, kw_only=True, forbid_unknown_fields=True):
    """The function member of a named tool choice."""

    name: Annotated[str, _doc("name of the function")]


class ToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """A named tool choice: this function is called."""

    type: Annotated[str, _doc("function")]
    function: Annotated[ToolName, _doc("the function")]


class ChatRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[
        list[Message], Meta(min_length=1, max_length=MAX_MESSAGES), _doc("the conversation")
    ]
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _doc("the newer name of max_tokens; both: they must be equal"),
    ] = None
    logprobs: Annotated[bool | None, _doc("log-probabilities of the generated tokens")] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        _doc("alternatives a token (needs logprobs)"),
    ] = None
    echo: Annotated[
        bool | None, _doc("put the last message before the answer if its role is the same")
    ] = None
    tools: Annotated[
        Annotated[list[Tool], Meta(max_length=128)] | None, _doc("functions that may be called")
    ] = None
    tool_choice: Annotated[
        str | ToolChoice | None, _doc("none, auto, required, or a named function")
    ] = None
    parallel_tool_calls: Annotated[bool | None, _doc("false: at most one call (needs tools)")] = (
        None
    )
    add_generation_prompt: Annotated[
        bool | None, _doc("open the assistant's turn at the end; default true")
    ] = None
    continue_final_message: Annotated[
        bool | None, _doc("the answer continues the last message (no generation prompt)")
    ] = None
    documents: Annotated[list[dict[str, Any]] | None, _doc("handed to the chat template")] = None
    chat_template: Annotated[
        Annotated[str, Meta(max_length=100_000)] | None,
        _doc("a template in place of the model's, sandboxed and bounded"),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, _doc("more variables for the chat template")
    ] = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a prompt or messages."""

    model: Annotated[str | None, _doc("name of the served model")] = None
    prompt: Annotated[str | None, _doc("a text")] = None
    messages: Annotated[
        Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None,
        _doc("a conversation"),
    ] = None
    tools: Annotated[
        Annotated[list[Tool], Meta(max_length=128)] | None,
        _doc("functions, for the chat template"),
    ] = None
    add_special_tokens: Annotated[bool | None, _doc("add the model's begin token")] = None
    add_generation_prompt: Annotated[bool | None, _doc("as in a chat request")] = None
    continue_final_message: Annotated[bool | None, _doc("as in a chat request")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, _doc("as in a chat request")] = None
    return_token_strs: Annotated[bool | None, _doc("add the text of each token")] = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    model: Annotated[str | None, _doc("name of the served model")] = None
    tokens: Annotated[list[TokenId], _doc("token ids")]
