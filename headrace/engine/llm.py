"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, in this process."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.load import load
from headrace.engine.messages import Logprob, Output, Submit
from headrace.engine.params import SamplingParams, make_submit
from headrace.errors import RequestError
from headrace.text.chat import ChatTemplate, render_chat
from headrace.text.detokenize import Detokenizer, StopStrings

Prompt = str | Sequence[int]


@dataclass
class CompletionOutput:
    """One of the n answers of a request. logprobs: one entry per token where asked."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """The answers to one prompt. num_cached_tokens: prompt tokens read from the prefix cache.

    metrics: 'ttft' and 'e2e' in seconds.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprob | None] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True when every output has a finish reason."""
        return all(output.finish_reason is not None for output in self.outputs)


class _Choice:
    """Text of one sequence as its tokens arrive."""

    def __init__(self, index: int, params: SamplingParams, llm: "LLM") -> None:
        self.output = CompletionOutput(index)
        self._detokenizer = Detokenizer(
            llm.tokenizer,
            skip_special=params.skip_special_tokens,
            spaces_between=params.spaces_between_special_tokens,
        )
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        if params.logprobs is not None:
            self.output.logprobs = []

    def take(self, message: Output, include_stop_token: bool) -> tuple[str, bool]:
        """Add a message's tokens; returns (new text, a stop string was found).

        Token by token, so that tokens past a stop string are neither kept nor counted.
        """
        output, pieces = self.output, []
        for place, token in enumerate(message.tokens):
            output.token_ids.append(token)
            if output.logprobs is not None and message.logprobs is not None:
                output.logprobs.append(message.logprobs[place])
            last = place == len(message.tokens) - 1
            if last and message.stop_token == token and not include_stop_token:
                continue
            text, stopped = self._safe(self._detokenizer.push((token,)))
            pieces.append(text)
            if stopped is not None:
                output.finish_reason, output.stop_reason = "stop", stopped
                return self._add(pieces), True
        if message.finish is not None:
            text, stopped = self._safe(self._detokenizer.flush())
            pieces.append(text)
            if stopped is None:
                pieces.append(self._stops.flush())
            output.finish_reason = "stop" if stopped is not None else message.finish
            output.stop_reason = stopped if stopped is not None else message.stop_token
            output.cumulative_logprob = message.cumulative_logprob
        return self._add(pieces), False

    def _safe(self, text: str) -> tuple[str, str | None]:
        """Text that is surely part of the answer, and the stop string that is complete with it.
        Text of the first min_tokens tokens is not searched, as in vLLM and in the server."""
        if len(self.output.token_ids) <= self._min_tokens:
            return text, None
        return self._stops.push(text)

    def _add(self, pieces: list[str]) -> str:
        text = "".join(pieces)
        self.output.text += text
        return text


class LLM:
    """A model in this process.

    model: a .gguf file, a folder or a short name. options: fields of `EngineConfig`
    (max_model_len=..., threads=..., backend=...). Raises the errors of `engine.load.load`.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        known = EngineConfig.__dataclass_fields__
        for name in options:
            if name not in known:
                raise TypeError(f"LLM: unknown option {name!r}; known: {', '.join(sorted(known))}")
        config = EngineConfig(**options) if model is None else EngineConfig(model, **options)
        self.config = config
        self.loaded = load(config)
        self.engine = Engine(self.loaded)
        self.tokenizer = self.loaded.checkpoint.tokenizer()
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids), all in one continuous batch.

        A bar shows for more than one prompt on a terminal. Raises RequestError for the first prompt
        that cannot be taken; nothing has run then.
        """
        batch = _as_list(prompts)
        ids = [self._prompt_ids(prompt) for prompt in batch]
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return self._run(ids, texts, self._params(sampling_params, len(ids)), progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. template: options of `text.chat.render_chat`."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        ids = [self.chat_ids(conversation, **template) for conversation in conversations]
        params = self._params(sampling_params, len(ids))
        return self._run(ids, [None] * len(ids), params, progress)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation by the model's chat template.

        Raises RequestError when the model has none, or the template refuses the conversation.
        """
        source = self.tokenizer.chat_template
        if source is None:
            raise RequestError("messages", "this model has no chat template")
        chat = ChatTemplate(
            source,
            bos_token=self._token_text(self.tokenizer.bos),
            eos_token=self._token_text(self.tokenizer.eos),
        )
        return render_chat(self.tokenizer, chat, list(messages), **template)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
        """Text of one answer, piece by piece. Leaving the loop early frees the request."""
        final = self.stream_output(prompt, params)
        for text, _ in final:
            yield text

    def stream_output(
        self, prompt: Prompt, params: SamplingParams
    ) -> Iterator[tuple[str, RequestOutput]]:
        """As `stream`, with the request's state so far beside each piece."""
        if params.num_sequences != 1:
            raise RequestError("n", "stream takes n = 1")
        ids = self._prompt_ids(prompt)
        submit = self._submit(ids, params)
        self.engine.submit(submit)
        request = _Running(submit, ids, None, params, self)
        try:
            while not request.result.finished:
                for output in self._step():
                    text = request.take(output, self)
                    yield text, request.result
        finally:
            self.engine.abort(submit.id)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self.engine.reset_prefix_cache()

    def get_metrics(self) -> dict[str, float]:
        """Counters and gauges of the engine."""
        return self.engine.stats()

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the loop -----------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        params: list[SamplingParams],
        progress: bool,
    ) -> list[RequestOutput]:
        submits = [self._submit(ids, each) for ids, each in zip(prompts, params, strict=True)]
        running: dict[str, _Running] = {}
        try:
            for submit, ids, text, each in zip(submits, prompts, texts, params, strict=True):
                self.engine.submit(submit)
                running[submit.id] = _Running(submit, ids, text, each, self)
            results = [request.result for request in running.values()]
            with _Bar(len(running) if progress else 0) as bar:
                while running:
                    for output in self._step():
                        request = running[output.id]
                        request.take(output, self)
                        if request.result.finished:
                            request.rank()
                            del running[output.id]
                            bar.advance(len(request.result.outputs[0].token_ids))
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        return results

    def _step(self) -> tuple[Output, ...]:
        if self.engine.only_compiling:
            time.sleep(0.001)
        outputs = self.engine.step()
        if outputs is None:
            return ()
        for refused in outputs.refused:
            raise RequestError(refused.field, refused.message, refused.code)
        return outputs.outputs

    def _submit(self, ids: list[int], params: SamplingParams) -> Submit:
        return make_submit(
            f"llm-{next(self._numbers)}",
            ids,
            params,
            self.tokenizer,
            self.loaded.plan.max_model_len,
            default_seed=self.config.seed,
        )

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(
                "sampling_params", f"{len(params)} sampling_params for {count} prompts"
            )
        return list(params)

    def _token_text(self, token: int | None) -> str:
        return "" if token is None else self.tokenizer.token_text(token)


class _Running:
    """A request of the offline API while it runs."""

    def __init__(
        self, submit: Submit, ids: list[int], text: str | None, params: SamplingParams, llm: LLM
    ) -> None:
        self.submit, self.params = submit, params
        self.choices = [_Choice(index, params, llm) for index in range(submit.n)]
        self.started = time.perf_counter()
        self.result = RequestOutput(
            submit.id, text, ids, [choice.output for choice in self.choices]
        )

    def take(self, message: Output, llm: LLM) -> str:
        """Apply a message; ends the sequence in the engine where a stop string was found."""
        result, choice = self.result, self.choices[message.index]
        if choice.output.finish_reason is not None:
            return ""
        result.num_cached_tokens = message.cached_tokens
        if message.prompt_logprobs is not None:
            result.prompt_logprobs = list(message.prompt_logprobs)
        now = time.perf_counter() - self.started
        result.metrics.setdefault("ttft", now)
        result.metrics["e2e"] = now
        text, stopped = choice.take(message, self.params.include_stop_str_in_output)
        if stopped and message.finish is None:
            llm.engine.finish(self.submit.id, message.index)
        return text

    def rank(self) -> None:
        """Keep the best n of best_of by mean log-probability."""
        params = self.params
        if params.best_of is None or params.best_of <= params.n:
            return
        outputs = self.result.outputs
        outputs.sort(key=lambda o: -_mean(o.logprobs or []))
        del outputs[params.n :]
        for index, output in enumerate(outputs):
            outputs[index] = replace(
                output,
                index=index,
                logprobs=None if params.logprobs is None else output.logprobs,
            )


class _Bar:
    """Progress over many prompts, on a terminal only."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._progress: Any = None
        self._task: Any = None
        self._tokens = 0
        self._started = time.perf_counter()

    def __enter__(self) -> "_Bar":
        if self._total > 1:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.0f} tok/s"),
                transient=True,
            )
            if not self._progress.console.is_terminal:
                self._progress = None
                return self
            self._progress.start()
            self._task = self._progress.add_task("prompts", total=self._total, rate=0.0)
        return self

    def advance(self, tokens: int) -> None:
        """One prompt is done, with that many tokens."""
        self._tokens += tokens
        if self._progress is not None:
            rate = self._tokens / (time.perf_counter() - self._started)
            self._progress.update(self._task, advance=1, rate=rate)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _mean(logprobs: list[Logprob]) -> float:
    return sum(entry.logprob for entry in logprobs) / max(len(logprobs), 1)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
