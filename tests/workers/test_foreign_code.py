"""A checkpoint is data: nothing that lies in its directory is run, whatever its files ask for."""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from workers.checkpoint import resolve
from workers.config import WorkerConfig
from workers.tokenizer import ChatTemplateError, Tokenizer, TokenizerError
from workers.worker import Worker

HELLO = [{"role": "user", "content": "Hello"}]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch {mark}') }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('{mark}', 'w') }}",
    "{{ ''['__class__'] }}",
    "{{ ('{0.__class__.__mro__}').format('') }}",
    "{{ messages.append(messages[0]) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ range(10 ** 9) | list | length }}",
]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that exists once something of the checkpoint has been run."""
    return tmp_path / "mark"


@pytest.fixture
def checkpoint(tmp_path: Path, smollm2_dir: Path) -> Path:
    """A directory with the real model's tokenizer and no weights."""
    folder = tmp_path / "checkpoint"
    AutoTokenizer.from_pretrained(smollm2_dir).save_pretrained(folder)
    shutil.copy(smollm2_dir / "config.json", folder)
    return folder


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_run_in_a_sandbox(checkpoint: Path, mark: Path, template: str) -> None:
    (checkpoint / "chat_template.jinja").write_text(template.replace("{mark}", str(mark)))
    tokenizer = Tokenizer.load(checkpoint)
    try:
        rendered = tokenizer.render_chat(HELLO)
    except ChatTemplateError:
        rendered = ""
    assert rendered in ("", "None")
    assert not mark.exists()
    assert HELLO == [{"role": "user", "content": "Hello"}]


def ask_for_code(folder: Path, file: str, mark: Path) -> None:
    """What `trust_remote_code` would follow: a class in a module beside the checkpoint."""
    (folder / "foreign.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Foreign: pass\n")
    content = json.loads((folder / file).read_text())
    classes = {"AutoConfig": "foreign.Foreign", "AutoTokenizer": ["foreign.Foreign", "foreign.Foreign"]}
    changed = {"model_type": "foreign"} if file == "config.json" else {"tokenizer_class": "Foreign"}
    (folder / file).write_text(json.dumps(content | changed | {"auto_map": classes}))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_modules_beside_a_checkpoint_are_not_imported(checkpoint: Path, mark: Path, file: str) -> None:
    ask_for_code(checkpoint, file, mark)
    with suppress(TokenizerError):
        Tokenizer.load(checkpoint)
    with pytest.raises((ValueError, OSError)):
        Worker(WorkerConfig(str(checkpoint))).load()
    assert not mark.exists()


class Exploit:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt"])
def test_pickled_weights_are_not_read(checkpoint: Path, mark: Path, name: str) -> None:
    (checkpoint / name).write_bytes(pickle.dumps({"model.embed_tokens.weight": Exploit(mark)}))
    with pytest.raises((ValueError, OSError)):
        Worker(WorkerConfig(str(resolve(str(checkpoint))))).load()
    assert not mark.exists()
    torch.save({"w": Exploit(mark)}, checkpoint / name)
    with pytest.raises((ValueError, OSError)):
        Worker(WorkerConfig(str(resolve(str(checkpoint))))).load()
    assert not mark.exists()
