"""Text to token ids and back, and messages to a prompt: a model's own tokenizer behind the few calls we need. No torch.

Encoding may be called from several threads at once. A Rust tokenizer is used without the wrapper's padding and
truncation state, which is what makes that safe, and lets go of the GIL while it works; any other kind is locked.
"""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.detokenizer import Detokenizer
from workers.words import in_a_line

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A directory without a usable tokenizer. The message is one line."""


class ChatTemplateError(ValueError):
    """Messages that the model's template does not take, or a model without one. The message is one line."""


class Tokenizer:
    """The tokenizer of one checkpoint. `eos_token_ids` end a generation, `special_ids` have no text of their own."""

    def __init__(self, wrapped: Any, eos_token_ids: Sequence[int]) -> None:
        self._wrapped = wrapped
        self._lock = threading.Lock()
        self._fast = wrapped.backend_tokenizer if wrapped.is_fast else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_token_ids))
        added = {token for token, about in wrapped.added_tokens_decoder.items() if about.special}
        self.special_ids: frozenset[int] = frozenset(added | set(wrapped.all_special_ids))
        self._byte_of = _byte_alphabet() if self._fast is not None and "ByteLevel" in repr(self._fast.decoder) else {}

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Read the tokenizer of a local checkpoint directory. Raises TokenizerError."""
        from transformers import AutoTokenizer

        try:
            wrapped = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever a broken or foreign file makes of the library
            raise TokenizerError(_why_not(Path(model_dir), error)) from error
        return cls(wrapped, _eos_token_ids(Path(model_dir), wrapped.eos_token_id))

    @property
    def as_json(self) -> str | None:
        """As a `tokenizer.json`; None for a tokenizer that is not of the Rust kind."""
        return None if self._fast is None else str(self._fast.to_str())

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapped.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` as the tokenizer does by itself (a BOS, for many models)."""
        if self._fast is not None:
            encoded = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded[0].ids)
        with self._lock:
            return list(self._wrapped.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids that the tokenizer does not know have none."""
        kept = [token for token in ids if token not in self.special_ids] if skip_special_tokens else list(ids)
        return self._decode(kept)

    def detokenizer(self, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """For the text of tokens that come one by one after `prompt`."""
        return Detokenizer(self._decode, self.special_ids if skip_special_tokens else frozenset(), prompt)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that the model's template (sandboxed) makes of messages. Raises ChatTemplateError."""
        if not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template; use completions")
        arguments = dict(template_arguments or {})
        reserved = inspect.signature(self._wrapped.apply_chat_template).parameters
        if taken := next((name for name in arguments if name in reserved or name == "messages"), None):
            raise ChatTemplateError(f"{taken} is no argument of a chat template")
        try:
            rendered = self._wrapped.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **arguments,
            )
        except Exception as error:  # templates raise by themselves, and trip over what they did not expect
            raise ChatTemplateError(f"the model's chat template refused the messages: {in_a_line(error)}") from error
        return str(rendered)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `render_chat`; the template has put the special tokens in. Raises ChatTemplateError."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters; b"" for one that is not known."""
        piece = self._piece(token)
        if piece is None:
            return b""
        if token in self._wrapped.added_tokens_decoder:
            return piece.encode()
        if piece and all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if "▁" in piece:
            return piece.replace("▁", " ").encode()
        return self._decode([token]).encode()

    def _piece(self, token: int) -> str | None:
        if self._fast is not None:
            piece: str | None = self._fast.id_to_token(token)
            return piece
        with self._lock:
            known = 0 <= token < len(self._wrapped)
            return str(self._wrapped.convert_ids_to_tokens(token)) if known else None

    def _decode(self, ids: list[int]) -> str:
        if self._fast is not None:
            return str(self._fast.decode(ids, skip_special_tokens=False))
        with self._lock:
            text = self._wrapped.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return str(text)


def check_tokenizer(model_dir: Path) -> None:
    """Raises TokenizerError where `Tokenizer.load` would, as far as that can be told in a tenth of its time: files that
    are whole are read without transformers, which has the last word on any others."""
    import tokenizers

    try:
        tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        json.loads((model_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    except Exception:  # the Rust library raises nothing narrower
        Tokenizer.load(model_dir)


def _eos_token_ids(model_dir: Path, own: int | None) -> list[int]:
    """The tokenizer's own, and those that the checkpoint says it was trained to end with."""
    found = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        try:
            stated = json.loads((model_dir / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        found += [token for token in (stated if isinstance(stated, list) else [stated]) if isinstance(token, int)]
    return found


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable ones as they are, the others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _why_not(model_dir: Path, error: Exception) -> str:
    """The library reads config.json before any file of a tokenizer's, which is not to blame then."""
    from transformers import AutoConfig

    reason = in_a_line(error)
    try:
        AutoConfig.from_pretrained(str(model_dir), trust_remote_code=False, local_files_only=True)
    except Exception as refused:
        if in_a_line(refused) == reason:
            return f"{model_dir / 'config.json'} cannot be used: {reason}"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not _is_json(model_dir / name):
            return f"{model_dir} has no usable tokenizer: its {name} is no JSON: {reason}"
    missing = "" if (model_dir / "tokenizer.json").is_file() else " (no tokenizer.json is there)"
    return f"{model_dir} has no usable tokenizer{missing}: {reason}"


def _is_json(file: Path) -> bool:
    """A file that is not there is no worse than one that is."""
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return True
    except ValueError:
        return False
    return True
