"""Plans that contradict the worker, options that cannot be served, and errors that belong to one sequence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from scheduler.plan import NO_TOKEN, Admission, Forward, IterationPlan, Segment
from tests.conftest import save_tiny
from tests.workers.driver import GREEDY, driver_on, loaded
from workers.config import WorkerConfig
from workers.slots import PlanError
from workers.worker import Worker, choose_dtype


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = loaded(save_tiny(tmp_path_factory.mktemp("tiny")), blocks=20, max_running=4, threads=1)
    yield worker
    worker.close()


@pytest.mark.skipif(not psutil.LINUX, reason="what is mapped is looked up in /proc")
def test_the_checkpoint_is_not_mapped_any_more(tmp_path: Path) -> None:
    """One tensor that is a part of the mapped file would keep the whole file in the process's memory."""
    worker = Worker(WorkerConfig(str(save_tiny(tmp_path)), threads=1))
    worker.load()
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    worker.close()
    assert str(tmp_path) not in mapped


ENTER = (Admission(0, (1, 2, 3), 3, GREEDY),)


def plan(*segments: Segment, admit: tuple[Admission, ...] = (), release: tuple[int, ...] = ()) -> IterationPlan:
    return IterationPlan(1, (Forward(chunks=segments),) if segments else (), admit, release)


def decoding(*slots: int, new_blocks: tuple[tuple[int, int], ...] = ()) -> IterationPlan:
    """A prompt of three tokens enters slot 0 and has two of them computed; then these slots decode."""
    prefill = Forward(chunks=(Segment(0, 0, 2, (0,)),))
    return IterationPlan(1, (prefill, Forward(slots, (), new_blocks)), ENTER)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (plan(Segment(1, 0, 1, (0,))), "holds no sequence"),
        (plan(release=(2,)), "holds no sequence"),
        (plan(admit=ENTER * 2), "is taken"),
        (plan(admit=(Admission(9, (1,), 1, GREEDY),)), "slot 9 of 4"),
        (plan(admit=(Admission(1, (), 0, GREEDY),)), "do not fit"),
        (plan(admit=(Admission(1, (1,) * 3000, 3000, GREEDY),)), "do not fit"),
        (plan(Segment(0, 0, 4, (0,)), admit=ENTER), "do not exist"),
        (plan(Segment(0, 0, 0, (0,)), admit=ENTER), "no tokens"),
        (plan(Segment(0, -1, 2, (0,)), admit=ENTER), "do not exist"),
        (plan(Segment(0, 0, 1, (0,)), Segment(0, 1, 1), admit=ENTER), "twice in one forward"),
        (plan(Segment(0, 0, 2, (0,), True), admit=ENTER), "samples a token that exists"),
        (plan(Segment(0, 0, 3), admit=ENTER), "no block"),
        (plan(Segment(0, 0, 3, (20,)), admit=ENTER), "outside the pool"),
        (decoding(1), "holds no sequence"),
        (decoding(-1), "holds no sequence"),
        (decoding(0, 0), "twice in one forward"),
        (decoding(0, new_blocks=((1, 3),)), "holds no sequence"),
        (decoding(0, new_blocks=((0, 20),)), "outside the pool"),
        (IterationPlan(1, (Forward(decodes=(0,)),), ENTER), "have not been computed"),
        (IterationPlan(1, (Forward(),), ENTER), "no tokens"),
    ],
)
def test_a_plan_that_contradicts_the_worker_is_a_plan_error(tiny: Worker, bad: IterationPlan, words: str) -> None:
    driver_on(tiny, 20)
    with pytest.raises(PlanError, match=words):
        tiny.execute(bad)


def test_a_sequence_without_finite_scores_fails_alone(tiny: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_on(tiny, 20)
    driver.admit(0, [5, 6])
    driver.admit(1, [7, 8])
    healthy = tiny.model.logits

    def broken(*arguments: object) -> torch.Tensor:
        logits = healthy(*arguments).clone()  # type: ignore[arg-type]
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(tiny.model, "logits", broken)
    result = driver.step({0: 2, 1: 2})
    assert result.tokens[0] == NO_TOKEN
    assert [index for index, _ in result.errors] == [0]
    assert result.tokens[1] >= 0


def test_a_chunk_that_does_not_end_its_prompt_samples_nothing(tiny: Worker) -> None:
    driver = driver_on(tiny, 20)
    driver.admit(0, list(range(10, 40)))
    assert driver.step({0: 10}).tokens == ()
    assert driver.step({0: 10}).tokens == ()
    assert len(driver.step({0: 10}).tokens) == 1


def test_description(tiny: Worker) -> None:
    description = tiny.load()
    assert (description.device, description.dtype, description.attention) == ("cpu", "float32", "cpu")
    assert (description.query_heads, description.kv_heads, description.vocab_size) == (9, 3, 512)
    assert description.kv_bytes_per_block == 3 * 2 * 16 * 3 * 8 * 4, "layers, K and V, tokens, heads, head_dim, bytes"
    assert description.free_bytes > 2**20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["BertModel"]}, "architecture BertModel is not supported; supported: Llama"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ],
)
def test_a_model_that_is_not_supported_is_said_in_one_line(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=words):
        Worker(WorkerConfig(str(folder))).load()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda"}, "no CUDA device"),
        ({"attention": "flash_attn"}, "does not run on cpu"),
        ({"max_model_len": 5000}, "beyond the model's 2048 positions"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
    ],
)
def test_options_that_cannot_be_served(tmp_path: Path, options: dict[str, object], words: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match=words):
        Worker(WorkerConfig(str(save_tiny(tmp_path)), **options)).load()  # type: ignore[arg-type]


def test_dtypes_on_cuda_are_those_that_its_kernels_take(tmp_path: Path) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for stored, on_cuda in (("float32", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
        assert choose_dtype("auto", cpu, tmp_path) == torch.float32
        assert choose_dtype("auto", cuda, tmp_path) == on_cuda
    assert choose_dtype("float16", cuda, tmp_path) == torch.float16
    with pytest.raises(ValueError, match="do not take float32"):
        choose_dtype("float32", cuda, tmp_path)
