"""The JSON of chat answers."""

import secrets
import time
from typing import Any

from headrace.serve.calls import CallParser
from headrace.serve.choice import Piece, TokenText
from headrace.serve.resolve import Served, TextOptions
from headrace.serve.run import Prompt, Run
from headrace.serve.shapes import END, FINGERPRINT, Names, bounded, encode, prompt_scores
from headrace.serve.tools import ToolPlan


class ChatShape:
    """Answers of /v1/chat/completions.

    tools: how the text is read, as an answer or as calls. echo: text of the last message, put
    before each answer.
    """

    def __init__(self, answer_id: str, served: Served, options: TextOptions,
                 tools: ToolPlan | None = None, echo: str = "") -> None:  # fmt: skip
        self.id = answer_id
        self._options = options
        self._names = Names(served, options)
        self._tools = tools or ToolPlan()
        self._parsers: dict[int, CallParser] = {}
        self._echo = echo
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._prefix = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        self._tail = b'},"logprobs":null,"finish_reason":null,"stop_reason":null}]'

    def opening(self, run: Run, prompt: Prompt, index: int) -> bytes:
        """The event that names the role, before a choice's first piece."""
        delta: dict[str, Any] = {"role": "assistant", "content": self._echo}
        if self._tools.form == "arguments":
            call = self._call("")
            delta = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **call}]}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        head = self._head | {"choices": [choice]}
        if self._options.return_ids:
            head["prompt_token_ids"] = prompt.submit.prompt
        return b"data: " + encode(head) + b"\n\n"

    def chunk(self, run: Run, prompt: Prompt, piece: Piece) -> bytes:
        """One event with what a step added to a choice."""
        extras = (
            piece.finish or piece.logprobs or self._options.return_ids or self._tools.form != "text"
        )
        if not extras:
            data = b'%b%d,"delta":{"content":%b%b' % (
                self._prefix,
                piece.index,
                encode(piece.text),
                self._tail,
            )
        else:
            delta, called = self._delta(piece)
            choice = {"index": piece.index, "delta": delta, **self._ending(piece, called)}
            if self._options.return_ids:
                choice["token_ids"] = piece.token_ids
            data = b"data: " + encode(self._head | {"choices": [choice]})[:-1]
        if run.plan.continuous_usage:
            data += b',"usage":' + encode(run.usage())
        return data + END

    def usage(self, run: Run) -> bytes:
        """The event with the usage and no choices."""
        return b"data: " + encode(self._head | {"choices": [], "usage": run.usage()}) + b"\n\n"

    def whole(self, run: Run, pieces: list[tuple[Prompt, int, Piece]]) -> bytes:
        """A whole answer. pieces: (prompt, place among the answers, all of the choice)."""
        choices = []
        for _, place, piece in pieces:
            message, called = self._message(piece.text)
            choice = {"index": place, "message": message, **self._ending(piece, called)}
            if self._options.return_ids:
                choice["token_ids"] = piece.token_ids
            choices.append(choice)
        answer = self._head | {
            "object": "chat.completion", "choices": choices, "usage": run.usage()
        }  # fmt: skip
        prompt = run.prompts[0]
        if self._options.return_ids:
            answer["prompt_token_ids"] = prompt.submit.prompt
        if self._options.prompt_logprobs is not None and prompt.scores is not None:
            answer["prompt_logprobs"] = prompt_scores(
                prompt.submit.prompt, prompt.scores, self._names
            )
        return encode(answer)

    def _call(self, arguments: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-tool-{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": self._tools.function, "arguments": arguments},
        }

    def _parser(self) -> CallParser:
        return CallParser(self._tools.form == "array", self._tools.first_only)

    def _message(self, text: str) -> tuple[dict[str, Any], bool]:
        """The message of a whole answer, and whether it calls."""
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + text}
        if self._tools.form == "text":
            return message | {"refusal": None}, False
        if self._tools.form == "arguments":
            calls = [self._call(text)]
            content = None
        else:
            parser = self._parser()
            content = parser.push(text, last=True).content or None
            calls = [call.whole() for call in parser.calls]
        message["content"] = content if calls else self._echo + (content or "")
        message["refusal"] = None
        return message | ({"tool_calls": calls} if calls else {}), bool(calls)

    def _delta(self, piece: Piece) -> tuple[dict[str, Any], bool]:
        """The delta of a chunk, and whether the choice calls."""
        if self._tools.form == "text":
            return ({"content": piece.text} if piece.text or piece.finish is None else {}), False
        if self._tools.form == "arguments":
            calls = [{"index": 0, "function": {"arguments": piece.text}}]
            return ({"tool_calls": calls} if piece.text else {}), True
        parser = self._parsers.get(piece.index)
        if parser is None:
            parser = self._parsers[piece.index] = self._parser()
        found = parser.push(piece.text, last=piece.finish is not None)
        delta: dict[str, Any] = {"content": found.content} if found.content else {}
        if found.calls:
            delta["tool_calls"] = found.calls
        return delta, bool(parser.calls)

    def _ending(self, piece: Piece, called: bool) -> dict[str, Any]:
        finish = "tool_calls" if called and piece.finish == "stop" else piece.finish
        wanted = self._options.logprobs is not None
        return {
            "logprobs": self._logprobs(piece.logprobs) if wanted else None,
            "finish_reason": finish,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs(self, entries: list[TokenText]) -> dict[str, Any]:
        names, wanted = self._names, self._options.logprobs or 0
        content = []
        for entry in entries:
            if entry.logprob is None:
                continue
            content.append(
                {
                    "token": names.chosen(entry),
                    "logprob": bounded(entry.logprob.logprob),
                    "bytes": list(names.bytes(entry.token)),
                    "top_logprobs": [
                        {
                            "token": names.alone(token),
                            "logprob": bounded(logprob),
                            "bytes": list(names.bytes(token)),
                        }
                        for token, logprob in entry.logprob.top[:wanted]
                    ],
                }
            )
        return {"content": content, "refusal": None}
