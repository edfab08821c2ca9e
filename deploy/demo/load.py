"""The prompts of the demonstration: text of the model's own vocabulary, cut to exact numbers of tokens."""

from __future__ import annotations

from pathlib import Path

from deploy.demo.measure import LEAD_TOKENS, TAIL_TOKENS, Load

STREAM_PROMPT_TOKENS = 64
LEAST_CHUNK = 8

_TEXT = (
    "A lighthouse keeper wrote down the weather every morning. On some days the sea was flat and grey, and the ships "
    "passed far out; on others the wind came from the west and the gulls stood on the rocks with their heads turned. "
    "He counted the ships, the hours of fog, the barrels of oil. Once a month a boat brought letters and bread, and "
    "took the pages of his book to the harbour office, where nobody read them until the winter of the great storm. "
)


def make_load(model_dir: Path, streams: int, long: int) -> Load:
    """Streams of 64 prompt tokens, and one prompt of `long` tokens. At one token an iteration the streams outlast
    chunks of LEAST_CHUNK tokens."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(_TEXT, add_special_tokens=False).ids
    return Load(
        prompts=tuple(_cut(ids, start=7 * number, count=STREAM_PROMPT_TOKENS) for number in range(streams)),
        long=_cut(ids, start=5, count=long),
        tokens=LEAD_TOKENS + -(-long // LEAST_CHUNK) + TAIL_TOKENS,
    )


def _cut(ids: list[int], start: int, count: int) -> tuple[int, ...]:
    return tuple(ids[(start + position) % len(ids)] for position in range(count))
