"""From a model's name to a local directory in Hugging Face layout, fetched and converted once into a cache.

A name is the embedded model's, a local directory, a GGUF file, or a hub id. Nothing a checkpoint contains is executed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from workers.embedded import EMBEDDED_NAMES, GGUF_SHA256, fetch_gguf
from workers.gguf import Progress, UnsupportedGGUF, convert

EMBEDDED = "smollm2"
LAYOUT = 2
"""Part of every converted folder's name: raised when the conversion changes, so that no stale one is served."""


class CheckpointError(ValueError):
    """A model that is not there or cannot be used; one line that says what to do."""


def cache_dir() -> Path:
    """$STALLFREE_CACHE, or `stallfree` in the user's cache folder."""
    own = os.environ.get("STALLFREE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stallfree"


def resolve(model: str, progress: Progress | None = None) -> Path:
    """A local directory with config.json, safetensors and tokenizer. Raises CheckpointError.

    Safe for several processes at once: one of them fetches and converts, the others wait for it.
    """
    path = Path(model).expanduser()
    if model.lower() in EMBEDDED_NAMES and not path.exists():
        return _embedded(progress)
    if path.suffix == ".gguf":
        return _gguf(path, progress)
    if path.is_dir():
        return _directory(path)
    if path.exists():
        raise CheckpointError(f"{model} is neither a directory nor a .gguf file")
    if model.count("/") == 1 and not model.startswith((".", "~", "/")):
        return _hub(model)
    raise CheckpointError(
        f"model {model!r} not found: give {EMBEDDED} (the embedded model), a local directory, a .gguf file, or a hub id "
        f"such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def _directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; it is no Hugging Face model directory")
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(f"{path} has no .safetensors file; convert the weights to safetensors first")
    return path.resolve()


def _embedded(progress: Progress | None) -> Path:
    def build(target: Path) -> None:
        convert(fetch_gguf(target.parent, progress), target, progress)

    return _once(f"{EMBEDDED}-{GGUF_SHA256[:12]}-v{LAYOUT}", build)


def _gguf(path: Path, progress: Progress | None) -> Path:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return _once(f"gguf-{key}-v{LAYOUT}", lambda target: convert(path, target, progress))


def _once(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder of that name, built in a folder beside it and renamed, so that it is whole or not there."""
    root = cache_dir()
    final = root / name
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not final.is_dir():
                with tempfile.TemporaryDirectory(dir=root, prefix=f"{name}.partial-") as work:
                    target = Path(work) / "model"
                    target.mkdir()
                    build(target)
                    target.rename(final)
    except UnsupportedGGUF as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model to {root}: {error}; set STALLFREE_CACHE to another folder"
        ) from None
    return final


def _hub(model: str) -> Path:
    """Weights, config and tokenizer of a hub id, from the hub's own cache or the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.txt"]
    try:
        return _directory(Path(snapshot_download(model, allow_patterns=wanted)))
    except LocalEntryNotFoundError:
        raise CheckpointError(f"model {model!r} is not in the local hub cache and the hub cannot be reached") from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"model {model!r} could not be fetched from the hub: {reason}") from None


def remove_partial() -> None:
    """Delete what interrupted conversions left behind."""
    for left in cache_dir().glob("*.partial-*"):
        shutil.rmtree(left, ignore_errors=True)
