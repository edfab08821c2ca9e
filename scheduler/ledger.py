"""What came of the requests and has not been taken yet: deltas to publish, when tokens came, how requests fared."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.progress import Served, Timings, Together, TokenTiming, outcome_of
from scheduler.request import Delta, Finish, Sequence, TokenLogprob
from scheduler.streams import Came

_made = tuple.__new__
_PLAIN = Delta("")[3:]


class Ledger:
    """Deltas, timings and outcomes in the order in which they came."""

    __slots__ = ("_deltas", "_served", "_timings", "read")

    def __init__(self) -> None:
        self.read = True
        """Whether somebody reads the tokens. Where nobody does, deltas with no more than one in them are not made."""
        self._deltas: list[Delta] = []
        self._timings = Timings()
        self._served: list[Served] = []

    def book_step(self, came: Came, logprobs: Mapping[str, tuple[TokenLogprob, ...]]) -> None:
        """Tell of the tokens of a step, with their log-probabilities by request where those were asked for."""
        together, gap_s, own, _ = came
        if own:
            alone = {sequence.order for sequence, _ in own}
            together = [sequence for sequence in together if sequence.order not in alone]
            self._timings.others += [TokenTiming(of.request_id, None, gap_s, False) for of, gap_s in own]
        if together:
            self._timings.together.append(_made(Together, (together, gap_s)))
        if not self.read:
            return
        if logprobs:
            told = [(s.request_id, (s.tokens[-1],), logprobs.get(s.request_id, ())) for s in came.sequences]
            self._deltas += [Delta(*delta) for delta in told]
        else:
            self._deltas += [_made(Delta, (s.request_id, (s.tokens[-1],), (), *_PLAIN)) for s in came.sequences]

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
            gap = now - before
            sequence.had_gap(gap)
        sequence.last_token_at = now
        name, finish = sequence.request_id, Finish.LENGTH if last else None
        # One of each for every token there is: made without the detour over their constructors.
        since_arrival = now - sequence.arrival if before is None or last else None
        self._timings.others.append(_made(TokenTiming, (name, since_arrival, gap, last)))
        delta = _made(Delta, (name, (token,), logprobs, finish, None, cached, None, scores))
        if not last:
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

    @property
    def has_news(self) -> bool:
        return bool(self._deltas or self._served)

    def take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def take_timings(self) -> Timings:
        timings, self._timings = self._timings, Timings()
        return timings

    def take_served(self) -> list[Served]:
        served, self._served = self._served, []
        return served
