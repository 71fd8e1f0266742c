"""One answer as it grows: tokens to text, stop strings, log-probabilities beside their text.

Invariants, for every way the tokens arrive: the texts of all pieces joined are the answer; the
texts of the tokens that come with log-probabilities, joined, are the same; nothing of a stop string
is ever in a piece (unless it is to be included); a character is never split.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.engine.messages import Logprob, Output
from headrace.serve.resolve import TextOptions
from headrace.text.detokenize import Detokenizer, StopStrings
from headrace.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""What a log-probability of minus infinity is reported as: JSON has no infinity."""


class TokenText(NamedTuple):
    """A token beside its place in the text: `text` is what it added, starting at `offset`."""

    token: int
    text: str
    offset: int
    logprob: Logprob | None


@dataclass
class Piece:
    """What one step added to a choice. finish: the OpenAI reason, or None while it runs.
    stop_reason: the stop string or the user's stop token id that ended it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None

    @property
    def empty(self) -> bool:
        """True when there is nothing to tell."""
        return not (self.text or self.finish or self.logprobs)

    def extend(self, later: "Piece") -> None:
        """Add what a later step added."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish, self.stop_reason = later.finish, later.stop_reason


class Choice:
    """The state of one choice of a request. `ended` once it has a finish reason."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, options: TextOptions, offset: int = 0
    ) -> None:
        self.index = index
        self.ended = False
        self.num_tokens = 0
        self.logprob_sum = 0.0
        self._options = options
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special=options.skip_special,
            spaces_between=options.spaces_between,
            continued=True,
            keep=options.keep,
        )
        self._stops = StopStrings(options.stop, options.include_stop) if options.stop else None
        self._grown = offset
        self._sent = offset
        self._held_ids: list[int] = []
        self._held: list[TokenText] = []

    def push(self, output: Output) -> Piece:
        """Apply an output of this choice. Outputs after its end add nothing."""
        if self.ended:
            return Piece(self.index)
        if self._stops is None and output.logprobs is None:
            return self._push_plain(output)
        return self._push_each(output)

    def _push_plain(self, output: Output) -> Piece:
        tokens = output.tokens
        self.num_tokens += len(tokens)
        piece = Piece(self.index, token_ids=list(tokens))
        piece.text = self._detokenizer.push(self._shown(output))
        if output.finish is not None:
            piece.text += self._detokenizer.flush()
            self._end(piece, output)
        elif self._options.return_ids and not piece.text:
            self._held_ids += tokens
        if self._options.return_ids and (piece.text or piece.finish):
            piece.token_ids = [*self._held_ids, *tokens]
            self._held_ids = []
        return piece

    def _shown(self, output: Output) -> tuple[int, ...]:
        """The tokens whose text is part of the answer: all but the one that ended it."""
        ended = output.stop_token is not None and not self._options.include_stop
        return output.tokens[:-1] if ended else output.tokens

    def _push_each(self, output: Output) -> Piece:
        """Token by token: a stop string ends the answer with the token that completes it."""
        piece = Piece(self.index)
        shown = len(self._shown(output))
        last = len(output.tokens) - 1
        for place, token in enumerate(output.tokens):
            self.num_tokens += 1
            self._held_ids.append(token)
            text = self._detokenizer.push((token,)) if place < shown else ""
            if place == last and output.finish is not None:
                text += self._detokenizer.flush()
            self._note(token, text, output.logprobs[place] if output.logprobs else None)
            safe, matched = self._safe(text)
            piece.text += safe
            if matched is not None:
                piece.finish, piece.stop_reason = "stop", matched
                break
        if piece.finish is None and output.finish is not None:
            if not output.tokens:
                safe, piece.stop_reason = self._safe(self._detokenizer.flush())
                piece.text += safe
            if self._stops is not None and piece.stop_reason is None:
                piece.text += self._stops.flush()
            self._end(piece, output)
        self.ended = piece.finish is not None
        self._sent += len(piece.text)
        self._release(piece)
        return piece

    def _note(self, token: int, text: str, logprob: Logprob | None) -> None:
        if logprob is not None:
            self._held.append(TokenText(token, text, self._grown, logprob))
            self.logprob_sum += max(logprob.logprob, LOWEST)
        self._grown += len(text)

    def _safe(self, text: str) -> tuple[str, str | None]:
        """Text that may be sent now, and the stop string that is complete with it."""
        if self._stops is None or self.num_tokens <= self._options.min_tokens:
            return text, None
        return self._stops.push(text)

    def _release(self, piece: Piece) -> None:
        """Move the tokens whose text is out to the piece; at the end all, cut to what is out."""
        if not piece.text and not self.ended:
            return
        ready = 0
        while ready < len(self._held):
            entry = self._held[ready]
            end = entry.offset + len(entry.text)
            if end > self._sent:
                if not self.ended:
                    break
                keep = max(0, self._sent - entry.offset)
                self._held[ready] = entry._replace(
                    text=entry.text[:keep], offset=min(entry.offset, self._sent)
                )
            ready += 1
        piece.logprobs, self._held = self._held[:ready], self._held[ready:]
        piece.token_ids, self._held_ids = self._held_ids, []

    def _end(self, piece: Piece, output: Output) -> None:
        self.ended = True
        piece.finish = output.finish if piece.stop_reason is None else "stop"
        if output.finish == "stop" and output.stop_token in self._options.user_stop_ids:
            piece.stop_reason = output.stop_token


def prompt_tokens(
    tokenizer: Tokenizer, prompt: tuple[int, ...], scores: tuple[Logprob | None, ...] | None
) -> list[TokenText]:
    """The prompt's tokens with what each adds to the text (control tokens as their names).

    scores: one log-probability per position, None for the first.
    """
    detokenizer = Detokenizer(tokenizer, skip_special=False, continued=True)
    entries: list[TokenText] = []
    place = 0
    for index, token in enumerate(prompt):
        text = detokenizer.push((token,))
        if index == len(prompt) - 1:
            text += detokenizer.flush()
        entries.append(TokenText(token, text, place, scores[index] if scores else None))
        place += len(text)
    return entries
