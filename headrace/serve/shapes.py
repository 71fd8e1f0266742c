"""The JSON of answers: chunks of a stream, whole answers, log-probabilities.

A plain chunk is made by joining constant parts, encoded once a request, around the encoded text;
only chunks with extras go through a general encoder.
"""

import secrets
import time
from typing import Any, Protocol

import msgspec

from headrace import __version__
from headrace.engine.messages import Logprob
from headrace.serve.choice import LOWEST, Piece, TokenText, prompt_tokens
from headrace.serve.resolve import Served, TextOptions
from headrace.serve.run import Prompt, Run

encode = msgspec.json.Encoder().encode
FINGERPRINT = f"headrace-{__version__}"
END = b"}\n\n"


def new_id(prefix: str, given: str | None) -> str:
    """`prefix` and the client's own request id, or a random one."""
    return f"{prefix}-{given or secrets.token_hex(12)}"


class Names:
    """How tokens are written in log-probabilities."""

    def __init__(self, served: Served, options: TextOptions) -> None:
        self._tokenizer = served.tokenizer
        self._as_ids = options.tokens_as_ids

    def chosen(self, entry: TokenText) -> str:
        """The text that a token added, so that the tokens joined are the text."""
        return f"token_id:{entry.token}" if self._as_ids else entry.text

    def alone(self, token: int) -> str:
        """The text of a token by itself; one that is not whole characters shows its bytes."""
        if self._as_ids:
            return f"token_id:{token}"
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def bytes(self, token: int) -> bytes:
        """The bytes of a token."""
        return self._tokenizer.token_bytes(token)


def bounded(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST)


def prompt_scores(
    prompt: tuple[int, ...], scores: tuple[Logprob | None, ...], names: Names
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM shows them: per position, token id to its log-probability."""
    shown: list[dict[str, Any] | None] = []
    for entry in scores:
        if entry is None:
            shown.append(None)
            continue
        ranked = {
            token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)
        } | {entry.token: (entry.logprob, entry.rank)}
        shown.append(
            {
                str(token): {
                    "logprob": bounded(logprob),
                    "rank": rank,
                    "decoded_token": names.alone(token),
                }
                for token, (logprob, rank) in ranked.items()
            }
        )
    return shown


class Shape(Protocol):
    """How one kind of answer is written."""

    id: str

    def opening(self, run: Run, prompt: Prompt, index: int) -> bytes: ...
    def chunk(self, run: Run, prompt: Prompt, piece: Piece) -> bytes: ...
    def usage(self, run: Run) -> bytes: ...
    def whole(self, run: Run, pieces: list[tuple[Prompt, int, Piece]]) -> bytes: ...


class CompletionShape:
    """Answers of /v1/completions."""

    def __init__(self, answer_id: str, served: Served, options: TextOptions, n: int,
                 echo: list[str] | None) -> None:  # fmt: skip
        self.id = answer_id
        self._n = n
        self._echo = echo
        self._served = served
        self._options = options
        self._names = Names(served, options)
        self._head = {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": FINGERPRINT,
        }
        self._prefix = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        self._tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'

    def opening(self, run: Run, prompt: Prompt, index: int) -> bytes:
        """The echoed prompt, and its token ids, before a choice's first piece."""
        if self._echo is None and not self._options.return_ids:
            return b""
        choice = self._choice(prompt, Piece(index), [])
        choice["text"] = self._echo_text(prompt)
        if self._options.return_ids:
            choice["prompt_token_ids"] = prompt.submit.prompt
        if self._options.logprobs is not None and self._echo is not None:
            choice["logprobs"] = self._logprobs(self._echoed(prompt))
        return b"data: " + encode(self._head | {"choices": [choice]}) + b"\n\n"

    def chunk(self, run: Run, prompt: Prompt, piece: Piece) -> bytes:
        """One event with what a step added to a choice."""
        if piece.finish is None and not piece.logprobs and not self._options.return_ids:
            index = prompt.number * self._n + piece.index
            data = b'%b%d,"text":%b%b' % (self._prefix, index, encode(piece.text), self._tail)
        else:
            choice = self._choice(prompt, piece, self._placed(prompt, piece))
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
        for prompt, place, piece in pieces:
            echoed = self._echoed(prompt)
            entries = [*echoed, *self._placed(prompt, piece)]
            choice = self._choice(prompt, piece, entries, place)
            if self._echo is not None:
                choice["text"] = self._echo_text(prompt) + choice["text"]
            if self._options.return_ids:
                choice["prompt_token_ids"] = prompt.submit.prompt
            if self._options.prompt_logprobs is not None and prompt.scores is not None:
                choice["prompt_logprobs"] = prompt_scores(
                    prompt.submit.prompt, prompt.scores, self._names
                )
            choices.append(choice)
        return encode(self._head | {"choices": choices, "usage": run.usage()})

    def _choice(
        self, prompt: Prompt, piece: Piece, entries: list[TokenText], place: int | None = None
    ) -> dict[str, Any]:
        place = piece.index if place is None else place
        choice: dict[str, Any] = {
            "index": prompt.number * self._n + place,
            "text": piece.text,
            "logprobs": None if self._options.logprobs is None else self._logprobs(entries),
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }
        if self._options.return_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _placed(self, prompt: Prompt, piece: Piece) -> list[TokenText]:
        """The piece's tokens at their offsets in the text, after an echoed prompt."""
        if self._echo is None or not piece.logprobs:
            return piece.logprobs
        shift = len(self._echo_text(prompt))
        return [entry._replace(offset=entry.offset + shift) for entry in piece.logprobs]

    def _echo_text(self, prompt: Prompt) -> str:
        if self._echo is None:
            return ""
        if self._options.logprobs is not None:
            return "".join(entry.text for entry in self._echoed(prompt))
        return self._echo[prompt.number]

    def _echoed(self, prompt: Prompt) -> list[TokenText]:
        """The prompt's tokens, where they are echoed with log-probabilities."""
        if self._echo is None or self._options.logprobs is None:
            return []
        return prompt_tokens(self._served.tokenizer, prompt.submit.prompt, prompt.scores)

    def _logprobs(self, entries: list[TokenText]) -> dict[str, Any]:
        names, wanted = self._names, self._options.logprobs or 0
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            if entry.logprob is None:
                tops.append(None)
                continue
            top = {names.chosen(entry): bounded(entry.logprob.logprob)}
            for token, logprob in entry.logprob.top[:wanted]:
                if token != entry.token:
                    top.setdefault(names.alone(token), bounded(logprob))
            tops.append(dict(sorted(top.items(), key=lambda item: -item[1])))
        return {
            "tokens": [names.chosen(entry) for entry in entries],
            "token_logprobs": [
                None if entry.logprob is None else bounded(entry.logprob.logprob)
                for entry in entries
            ],
            "top_logprobs": tops,
            "text_offset": [entry.offset for entry in entries],
        }
