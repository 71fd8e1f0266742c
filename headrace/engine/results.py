"""Reading a step's outputs: log-probabilities of sampled tokens and of scored prompt positions."""

from headrace.core.plan import StepPlan
from headrace.engine.books import Books
from headrace.engine.messages import Logprob
from headrace.engine.state import SequenceState
from headrace.ops.batch import RaggedBatch


class Results:
    """Sample points of one batch. Scored positions follow the samples of the plan."""

    def __init__(self, batch: RaggedBatch, books: Books) -> None:
        self._batch = batch
        self._books = books

    def pack_scores(self, plan: StepPlan, first: int) -> None:
        """What each scored position asks for: the known id there, and how many alternatives."""
        for index in range(len(plan.scores) // 3):
            submit = self._books.sequence(plan.scores[3 * index + 1]).request.submit
            position = plan.scores[3 * index + 2]
            self._batch.forced[first + index] = submit.prompt[position]
            self._batch.top_logprobs[first + index] = submit.sampling.prompt_logprobs or 0

    def collect_scores(self, plan: StepPlan, first: int) -> None:
        """Move the log-probabilities of scored prompt positions to their requests."""
        for index in range(len(plan.scores) // 3):
            request = self._books.sequence(plan.scores[3 * index + 1]).request
            position = plan.scores[3 * index + 2]
            if request.prompt_logprobs is not None:
                wanted = request.submit.sampling.prompt_logprobs or 0
                entry = self._logprob(first + index, wanted, request.submit.prompt[position])
                request.prompt_logprobs[position] = entry

    def logprobs(self, states: list[SequenceState]) -> dict[int, Logprob]:
        """By sample point, for the sequences that want them."""
        return {
            index: self._logprob(index, wanted, int(self._batch.out_token[index]))
            for index, state in enumerate(states)
            if (wanted := state.request.submit.sampling.logprobs) is not None
        }

    def _logprob(self, index: int, wanted: int, token: int) -> Logprob:
        batch = self._batch
        top = zip(
            batch.out_top_token[index, :wanted].tolist(),
            batch.out_top_logprob[index, :wanted].tolist(),
            strict=True,
        )
        return Logprob(
            token, float(batch.out_logprob[index]), int(batch.out_rank[index]), tuple(top)
        )
