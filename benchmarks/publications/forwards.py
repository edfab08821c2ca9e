"""Single forwards: a token more than a whole number of tiles, and a tutorial's table of prompts."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.publications.held import A100
from benchmarks.publications.options import Options, Row
from scheduler.roofline import Features, Roofline
from scheduler.shapes import known_shape


def tile(options: Options) -> Iterator[Row]:
    """One prompt token more than a whole number of tiles, without streams and among 32 of them at 1,024."""
    for model, tp in (("Mistral-7B", 1), ("Yi-34B", 2)):
        predict = Roofline(known_shape(model), A100, tp).predict
        for tokens in (128, 256, 512, 1024):
            whole, more = (predict(Features().with_chunk(0, count)) for count in (tokens, tokens + 1))
            yield {
                "model": model,
                "tokens": tokens,
                "ms": _ms(whole),
                "one more": _ms(more),
                "percent": _percent(more / whole),
            }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 1)


def forward(options: Options) -> Iterator[Row]:
    """A warm forward of Qwen3-0.6B on one A100, and what its multiplications alone take at the GPU's peak."""
    shape = known_shape("Qwen3-0.6B")
    for tokens in (128, 256, 512, 1024, 2048, 4096):
        seconds = Roofline(shape, A100).predict(Features().with_chunk(0, tokens))
        yield {"tokens": tokens, "ms": _ms(seconds), "at peak ms": _ms(2 * shape.parameters * tokens / A100.peak_flops)}
