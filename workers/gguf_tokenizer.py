"""The tokenizer that a GGUF file carries in its metadata, written as Hugging Face's tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.checkpoint import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from workers.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF: special, and added but plain

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(file: GGUFFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises CheckpointError for a kind that is not known."""
    kind = file.need("tokenizer.ggml.model")
    if kind == "gpt2":
        _write_byte_pairs(file, directory)
    elif kind == "llama":
        _write_sentencepiece(file, directory)
    else:
        raise CheckpointError(f"{file.path} has a {kind!r} tokenizer, which is not supported (gpt2 and llama are)")


def _write_byte_pairs(file: GGUFFile, directory: Path) -> None:
    tokens = file.need("tokenizer.ggml.tokens")
    _byte_pairs(file, tokens).save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.need("llama.context_length"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := file.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token]
    if template := file.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _byte_pairs(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=_pre(file) == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_splits(file))
    tokenizer.decoder = decoders.ByteLevel()
    types = file.get("tokenizer.ggml.token_type") or []
    added = [
        (token, kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in added])
    if file.get("tokenizer.ggml.add_bos_token", False):
        bos = tokens[file.need("tokenizer.ggml.bos_token_id")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer


def _pre(file: GGUFFile) -> str:
    return str(file.get("tokenizer.ggml.pre", "default"))


def _splits(file: GGUFFile) -> list[Any]:
    """How text is cut into words before byte pairs are merged. GGUF names this only, so only what is known works."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match _pre(file):
        case "smollm" | "starcoder" | "refact" | "command-r":
            return [pre_tokenizers.Digits(individual_digits=True), byte_level]
        case "llama-bpe":
            words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
            return [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        case "gpt-2" | "default":
            return [byte_level]
        case other:
            raise CheckpointError(
                f"{file.path} cuts words by {other!r}, which is not known; take the safetensors checkpoint"
            )


def _write_sentencepiece(file: GGUFFile, directory: Path) -> None:
    """Llama 2's kind. transformers knows how to rebuild it (slow on its weights, quick enough on its tokenizer)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    tokenizer.save_pretrained(str(directory))
