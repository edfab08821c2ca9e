"""Text to tokens and back, whole and one token at a time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from workers.checkpoint import resolve
from workers.detokenizer import Detokenizer
from workers.tokenizer import ChatTemplateError, Tokenizer, TokenizerError, check_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve("smollm2"))


def detokenize(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


tokens_of_any_kind = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151)), max_size=150)


@given(tokens=tokens_of_any_kind, prompt=tokens_of_any_kind, skip=st.booleans())
def test_pieces_joined_are_the_whole_text(
    tokenizer: Tokenizer, tokens: list[int], prompt: list[int], skip: bool
) -> None:
    """Most ids below 300 are single bytes, so that this is mostly broken and unfinished UTF-8."""
    pieces = detokenize(tokenizer.detokenizer(prompt, skip), tokens)
    assert "".join(pieces) == tokenizer.decode(tokens, skip)


@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
def test_nothing_but_unfinished_characters_is_held_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assume(tokenizer.decode(tokens, skip_special_tokens=False) == text)  # this vocabulary lacks a few rare bytes
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == text.encode()
    detokenizer, so_far, seen = tokenizer.detokenizer(), b"", ""
    for token in tokens:
        so_far += tokenizer.token_bytes(token)
        seen += detokenizer.push(token)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert seen == so_far.decode(errors="ignore")


def test_the_window_stays_small_whatever_comes(tokenizer: Tokenizer) -> None:
    continuation = next(token for token in range(300) if tokenizer.token_bytes(token) == b"\x80")
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    pieces = detokenize(Detokenizer(decode), [continuation] * 5000)
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 5000
    assert longest < 100


@pytest.fixture(scope="module")
def sentencepiece_like() -> RustTokenizer:
    """Pieces with the space in front, bytes as <0xNN>, and a decoder that strips the first space, as Llama 2 has."""
    pieces = ["<unk>", "▁Hello", "▁world", "s", "▁", "."] + [f"<0x{byte:02X}>" for byte in range(256)]
    made = RustTokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return made


def test_a_decoder_that_strips_the_first_space_keeps_those_between_tokens(sentencepiece_like: RustTokenizer) -> None:
    def decode(ids: list[int]) -> str:
        return str(sentencepiece_like.decode(ids))

    assert detokenize(Detokenizer(decode), [1, 2, 3, 5, 2]) == ["Hello", " world", "s", ".", " world", ""]
    assert detokenize(Detokenizer(decode, prompt=[1]), [2, 2]) == [" world", " world", ""]
    emoji = [6 + byte for byte in "🙂".encode()]
    assert detokenize(Detokenizer(decode), [1, *emoji, 6 + 10, 2]) == ["Hello", "", "", "", "🙂", "\n", " world", ""]


def test_a_prompt_that_ends_inside_a_character_does_not_swallow_the_answer(tokenizer: Tokenizer) -> None:
    halves = tokenizer.encode("🌍")
    assert len(halves) > 1
    pieces = detokenize(tokenizer.detokenizer(prompt=halves[:-1]), halves[-1:])
    assert "".join(pieces) == tokenizer.decode(halves[-1:])


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_ids[0]
    hello = tokenizer.encode("Hello")
    assert detokenize(tokenizer.detokenizer(), [*hello, end, *hello])[-3:] == ["", "Hello", ""]
    assert "<|im_end|>" in "".join(detokenize(tokenizer.detokenizer(skip_special_tokens=False), [*hello, end]))


def test_a_chat_has_its_special_tokens_from_the_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.render_chat(messages)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    tokens = tokenizer.encode_chat(messages)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == rendered
    assert set(tokens) & tokenizer.special_ids
    unfinished = [*messages, {"role": "assistant", "content": "Well,"}]
    assert tokenizer.render_chat(unfinished, add_generation_prompt=False, continue_final_message=True).endswith(
        "assistant\nWell,"
    )


def test_a_template_that_raises_or_is_misused_says_so_in_one_line(tokenizer: Tokenizer) -> None:
    for messages, arguments in (
        ([{"role": "user", "content": None}], {}),
        ([{"role": "user", "content": "Hi"}], {"tokenize": True}),
        ([{"role": "user", "content": "Hi"}], {"chat_template": "{{ 1 }}"}),
    ):
        with pytest.raises(ChatTemplateError) as raised:
            tokenizer.render_chat(messages, template_arguments=arguments)
        assert "\n" not in str(raised.value)


def test_encoding_on_many_threads_at_once_gives_the_same(tokenizer: Tokenizer) -> None:
    texts = [f"{number} bottles of beer " * number for number in range(1, 60)]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(tokenizer.encode, texts * 5))
    assert together == alone * 5


def test_a_directory_without_a_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no usable tokenizer") as raised:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert "backend tokenizer from one of: (1) a" in str(raised.value)
    with pytest.raises(TokenizerError, match="no usable tokenizer"):
        check_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE"}}', "\udcff"])
def test_a_broken_tokenizer_is_one_clear_line(tmp_path: Path, smollm2_dir: Path, content: str) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content.encode(errors="surrogateescape"))
    looks: tuple[Callable[[Path], object], ...] = (Tokenizer.load, check_tokenizer)
    for look in looks:
        with pytest.raises(TokenizerError, match=r"no usable tokenizer: \S") as raised:
            look(tmp_path)
        assert "\n" not in str(raised.value)


def test_a_configuration_that_is_refused_is_not_the_tokenizer_s_fault(tmp_path: Path, smollm2_dir: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_dir / name, tmp_path)
    said = json.loads((smollm2_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "hidden_size": 640}))
    with pytest.raises(TokenizerError, match=r"config\.json cannot be used: .*640.* not a multiple") as raised:
        Tokenizer.load(tmp_path)
    assert "no usable tokenizer" not in str(raised.value)


def test_a_tokenizer_is_checked_without_transformers(smollm2_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from workers.tokenizer import check_tokenizer;"
        f"check_tokenizer(Path({str(smollm2_dir)!r})); print({{'torch', 'transformers'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
