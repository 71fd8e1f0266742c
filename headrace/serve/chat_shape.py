"""The JSON of chat answers."""

import time
from typing import Any

from headrace.serve.choice import Piece, TokenText
from headrace.serve.message import MessageReader, Reading
from headrace.serve.resolve import Served, TextOptions
from headrace.serve.run import Prompt, Run
from headrace.serve.shapes import END, FINGERPRINT, Names, bounded, encode, prompt_scores


class ChatShape:
    """Answers of /v1/chat/completions.

    reading: how the text becomes the parts of a message. echo: text of the last message, put before
    each answer.
    """

    def __init__(self, answer_id: str, served: Served, options: TextOptions,
                 reading: Reading | None = None, echo: str = "") -> None:  # fmt: skip
        self.id = answer_id
        self._options = options
        self._names = Names(served, options)
        self._reading = reading or Reading()
        self._readers: dict[int, MessageReader] = {}
        self._tokenizer = served.tokenizer
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
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        head = self._head | {"choices": [choice]}
        if self._options.return_ids:
            head["prompt_token_ids"] = prompt.submit.prompt
        return b"data: " + encode(head) + b"\n\n"

    def chunk(self, run: Run, prompt: Prompt, piece: Piece) -> bytes:
        """One event with what a step added to a choice."""
        extras = (
            piece.finish or piece.logprobs or self._options.return_ids or not self._reading.plain
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
            data += b',"usage":' + encode(self._usage(run))
        return data + END

    def usage(self, run: Run) -> bytes:
        """The event with the usage and no choices."""
        return b"data: " + encode(self._head | {"choices": [], "usage": self._usage(run)}) + b"\n\n"

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
            "object": "chat.completion", "choices": choices, "usage": self._usage(run)
        }  # fmt: skip
        prompt = run.prompts[0]
        if self._options.return_ids:
            answer["prompt_token_ids"] = prompt.submit.prompt
        if self._options.prompt_logprobs is not None and prompt.scores is not None:
            answer["prompt_logprobs"] = prompt_scores(
                prompt.submit.prompt, prompt.scores, self._names
            )
        return encode(answer)

    def _message(self, text: str) -> tuple[dict[str, Any], bool]:
        """The message of a whole answer, and whether it calls."""
        if self._reading.plain:
            content = self._echo + text
            return {"role": "assistant", "content": content, "refusal": None}, False
        reader = self._reading.reader()
        self._readers[len(self._readers)] = reader
        found = reader.push(text, last=True)
        for call in found.calls:
            del call["index"]
        content = self._echo + found.content
        empty = None if reader.called else ""
        parts = {"role": "assistant", **found.shown(), "content": content or empty}
        return parts | {"refusal": None}, reader.called

    def _delta(self, piece: Piece) -> tuple[dict[str, Any], bool]:
        """The delta of a chunk, and whether the choice calls."""
        if self._reading.plain:
            return ({"content": piece.text} if piece.text or piece.finish is None else {}), False
        reader = self._readers.get(piece.index)
        if reader is None:
            reader = self._readers[piece.index] = self._reading.reader()
        found = reader.push(piece.text, last=piece.finish is not None)
        return found.shown(), reader.called

    def _usage(self, run: Run) -> dict[str, Any]:
        """Token counts; those of reasoning are of its text, tokenized again."""
        usage = run.usage()
        if self._reading.marks is not None:
            encode_text = self._tokenizer.encode
            count = sum(
                len(encode_text(reader.reasoning, add_special=False))
                for reader in self._readers.values()
            )
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

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
