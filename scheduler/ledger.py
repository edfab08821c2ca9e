"""What came of the requests and has not been taken yet: deltas to publish, when tokens came, how requests fared."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from scheduler.progress import Served, Timings, Together, TokenTiming, outcome_of
from scheduler.request import Delta, Finish, Phase, Sequence, TokenLogprob

_made = tuple.__new__
_PLAIN = Delta("")[3:]


class Ledger:
    """Deltas, timings and outcomes in the order in which they came."""

    def __init__(self) -> None:
        self.read = True
        """Whether somebody reads the tokens. Where nobody does, deltas with no more than one in them are not made."""
        self._deltas: list[Delta] = []
        self._timings = Timings()
        self._served: list[Served] = []
        self._before, self._now, self._gap = 0.0, 0.0, 0.0

    def book_together(
        self, sampling: Seq[Sequence], tokens: Seq[int], now: float, ending: bool = True
    ) -> list[tuple[int, Sequence, int]]:
        """Add their tokens to the sequences that just go on, at the pace of the first: with a token before, and more
        to come (to all of them, where none is `ending`). Returns the others, untouched, with their places and tokens.

        That is nearly everybody in nearly every iteration, so that nothing more is done for each than has to be.
        """
        before = sampling[0].last_token_at if sampling else None
        if before is None:
            return list(zip(range(len(sampling)), sampling, tokens, strict=True))
        gap = now - before
        running = Phase.RUNNING
        others = [
            (place, sequence, token)
            for place, (sequence, token) in enumerate(zip(sampling, tokens, strict=True))
            if sequence.last_token_at is not before
            or sequence.phase is not running
            or token in sequence.stop_token_ids
            or (ending and len(sequence.tokens) + 1 >= sequence.final_length)
        ]
        together, theirs = list(sampling), list(tokens)
        for place, *_ in reversed(others):
            del together[place], theirs[place]
        # Short loops: of many groups' sequences few are in the processor's caches, and while a short loop waits for one
        # it has asked for those after it.
        for sequence, token in zip(together, theirs, strict=True):
            sequence.tokens.append(token)
        for sequence in together:
            sequence.pending -= 1
            sequence.last_token_at = now
            if gap > sequence.largest_gap_s:
                sequence.largest_gap_s = gap
        if together:
            self._timings.together.append(Together(together, gap))
            if self.read:
                self._deltas += [_made(Delta, (s.request_id, (s.tokens[-1],), (), *_PLAIN)) for s in together]
        return others

    def book(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprob, ...], now: float) -> Delta:
        """Add a token to its sequence. The delta is told, but for the last one, which `close` is to tell.

        With `max_tokens` 0 the token after the prompt is not wanted: it only says that the prompt is computed.
        """
        tokens = sequence.tokens
        tokens.append(token)
        last = len(tokens) >= sequence.final_length
        if last and not sequence.request.max_tokens:
            return Delta(
                sequence.request_id,
                finish=Finish.LENGTH,
                cached_tokens=sequence.cached_tokens,
                prompt_logprobs=sequence.take_prompt_logprobs(),
            )
        gap, cached, before = None, 0, sequence.last_token_at
        scores: tuple[TokenLogprob, ...] = ()
        if before is None:
            sequence.first_token_at, cached = now, sequence.cached_tokens
            if sequence.scores_wanted:
                scores = sequence.take_prompt_logprobs()
        else:
            gap = self._since(before, now)
            if gap > sequence.largest_gap_s:
                sequence.largest_gap_s = gap
        sequence.last_token_at = now
        name, finish = sequence.request_id, Finish.LENGTH if last else None
        # One of each for every token there is: made without the detour over their constructors.
        since_arrival = now - sequence.arrival if before is None or last else None
        self._timings.others.append(_made(TokenTiming, (name, since_arrival, gap, last)))
        delta = _made(Delta, (name, (token,), logprobs, finish, None, cached, None, scores))
        if not last:
            self._deltas.append(delta)
        return delta

    def _since(self, before: float, now: float) -> float:
        """Most tokens of an iteration come after the same one of the iteration before: they have one gap, and one
        number in memory for it."""
        if before is not self._before or now is not self._now:
            self._before, self._now, self._gap = before, now, now - before
        return self._gap

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

    def take_timings(self) -> Timings:
        timings, self._timings = self._timings, Timings()
        return timings

    def take_served(self) -> list[Served]:
        served, self._served = self._served, []
        return served
