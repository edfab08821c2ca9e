"""What came of the requests and has not been taken yet: deltas to publish, when tokens came, how requests fared."""

from __future__ import annotations

from scheduler.progress import Served, TokenTiming, outcome_of
from scheduler.request import Delta, Finish, Sequence, TokenLogprob


class Ledger:
    """Deltas, timings and outcomes in the order in which they came."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._timings: list[TokenTiming] = []
        self._served: list[Served] = []

    def book(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprob, ...], now: float) -> Delta:
        """Add a token to its sequence. The delta is told, but for the last one, which `close` is to tell.

        With `max_tokens` 0 the token after the prompt is not wanted: it only says that the prompt is computed.
        """
        sequence.tokens.append(token)
        last = len(sequence.tokens) >= sequence.final_length
        if last and not sequence.request.max_tokens:
            return Delta(
                sequence.request_id,
                finish=Finish.LENGTH,
                cached_tokens=sequence.cached_tokens,
                prompt_logprobs=sequence.take_prompt_logprobs(),
            )
        gap, cached = None, 0
        scores: tuple[TokenLogprob, ...] = ()
        if sequence.last_token_at is None:
            sequence.first_token_at, cached = now, sequence.cached_tokens
            if sequence.scores_wanted:
                scores = sequence.take_prompt_logprobs()
        else:
            gap = now - sequence.last_token_at
            if gap > sequence.largest_gap_s:
                sequence.largest_gap_s = gap
        sequence.last_token_at = now
        self._timings.append(TokenTiming(sequence.request_id, now - sequence.arrival, gap, last))
        if last:
            return Delta(sequence.request_id, (token,), logprobs, Finish.LENGTH, None, cached, None, scores)
        delta = Delta(sequence.request_id, (token,), logprobs, None, None, cached, None, scores)
        self._deltas.append(delta)
        return delta

    def tell(self, delta: Delta) -> None:
        self._deltas.append(delta)

    def close(self, sequence: Sequence, last: Delta) -> None:
        """Tell the last delta of a request, and how it fared if it ended as it should."""
        outcome = outcome_of(sequence) if last.finish in (Finish.STOP, Finish.LENGTH) else None
        if outcome is not None:
            self._served.append(Served(sequence.request_id, sequence.slo_class, outcome, sequence.predicted_ttft_s))
        self._deltas.append(last)

    def take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def take_timings(self) -> list[TokenTiming]:
        timings, self._timings = self._timings, []
        return timings

    def take_served(self) -> list[Served]:
        served, self._served = self._served, []
        return served
