"""Grammars that compile beside the steps."""

from concurrent.futures import Future

import pytest

from headrace.engine.constrain import Constraints
from headrace.engine.messages import GrammarSpec, SamplingSpec, Submit
from headrace.text.grammar import Grammar
from tests.serve.vocabulary import small_tokenizer

SUBMIT = Submit("a", (5,), 4, SamplingSpec(), grammar=GrammarSpec("regex", "[a-z]+"))


class DoneWhileAsked(Future[Grammar]):
    """A compilation that ends just after it has been asked whether it is done."""

    asked = 0

    def done(self) -> bool:
        self.asked += 1
        return self.asked > 1


def test_a_grammar_that_is_ready_between_two_looks_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = small_tokenizer()
    constraints = Constraints(lambda: tokenizer, tokenizer.vocabulary)
    future = DoneWhileAsked()
    future.set_result("grammar")  # type: ignore[arg-type]

    class Worker:
        def submit(self, *_: object) -> Future[Grammar]:
            return future

    monkeypatch.setattr(constraints, "_worker", lambda job: Worker())
    constraints.compile(SUBMIT)
    assert constraints.compiled() == []
    assert constraints.compiling
    assert constraints.compiled() == [(SUBMIT, "grammar")]
    assert not constraints.compiling
