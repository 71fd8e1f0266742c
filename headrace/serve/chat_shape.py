"""The JSON of chat answers."""

import secrets
import time
from typing import Any

from headrace.serve.choice import Piece, TokenText
from headrace.serve.resolve import Served, TextOptions
from headrace.serve.run import Prompt, Run
from headrace.serve.shapes import END, FINGERPRINT, Names, bounded, encode, prompt_scores


class ChatShape:
    """Answers of /v1/chat/completions.

    function: the function whose call is forced; the text of the answer is its arguments.
    echo: text of the last message, put before each answer.
    """

    def __init__(self, answer_id: str, served: Served, options: TextOptions,
                 function: str | None = None, echo: str = "") -> None:  # fmt: skip
        self.id = answer_id
        self._options = options
        self._names = Names(served, options)
        self._function = function
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
        if self._function is not None:
            delta = {"role": "assistant", "content": None, "tool_calls": [
                {"index": 0, **self._call("")}
            ]}  # fmt: skip
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        head = self._head | {"choices": [choice]}
        if self._options.return_ids:
            head["prompt_token_ids"] = prompt.submit.prompt
        return b"data: " + encode(head) + b"\n\n"

    def chunk(self, run: Run, prompt: Prompt, piece: Piece) -> bytes:
        """One event with what a step added to a choice."""
        extras = piece.finish or piece.logprobs or self._options.return_ids or self._function
        if not extras:
            data = b'%b%d,"delta":{"content":%b%b' % (
                self._prefix,
                piece.index,
                encode(piece.text),
                self._tail,
            )
        else:
            choice = {"index": piece.index, "delta": self._delta(piece), **self._ending(piece)}
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
            message: dict[str, Any] = {"role": "assistant", "content": self._echo + piece.text}
            if self._function is not None:
                message |= {"content": None, "tool_calls": [self._call(piece.text)]}
            message["refusal"] = None
            choice = {"index": place, "message": message, **self._ending(piece)}
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
            "function": {"name": self._function, "arguments": arguments},
        }

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if self._function is not None:
            if not piece.text:
                return {}
            call = {"index": 0, "function": {"arguments": piece.text}}
            return {"tool_calls": [call]}
        return {"content": piece.text} if piece.text or piece.finish is None else {}

    def _ending(self, piece: Piece) -> dict[str, Any]:
        finish = piece.finish
        if finish == "stop" and self._function is not None:
            finish = "tool_calls"
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
