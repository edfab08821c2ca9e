"""One rank of a worker group: loads its shard, keeps its pages and slots, and executes plans. Knows no Ray.

Every rank of a group gets the same plans in the same order and samples the same tokens from the same gathered logits,
so that each of them knows the next input without being told.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.plan import Forward, IterationPlan, IterationResult
from scheduler.request import TokenLogprob
from scheduler.sampling import SamplingParams
from workers.attention import PAGE_SIZE, check_page_size, make_attention, make_layout, token_positions
from workers.config import WorkerConfig, WorkerDescription
from workers.constraints import Constraints, GrammarError
from workers.drawing import prepare as prepare_drawing
from workers.elementwise import prepare as prepare_elementwise
from workers.greedy import prepare as prepare_greedy
from workers.host_cache import HostCache
from workers.kv_cache import KvCache, bytes_per_block
from workers.kv_dtype import choose_kv_dtype, name_of
from workers.kv_pages import make_pages
from workers.kv_transfer import KvTransfer
from workers.loader import checkpoint_dtype
from workers.memory import give_back
from workers.model import LlamaModel
from workers.model_config import read_config
from workers.parallel import Ranks
from workers.processors import hold_processors
from workers.sampler import Row, Sampled, sample
from workers.scoring import MOST_ROWS, score
from workers.shard import Shard, check_degree
from workers.slots import Batch, PlanError, Slots
from workers.worst_case import Shape, by_counting, on_cuda, plan_of, worst_shape


class Worker:
    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self._slots: Slots | None = None
        self._cache: KvCache | None = None
        self._transfer: KvTransfer | None = None
        self._making_transfer = threading.Lock()
        self._host: HostCache | None = None

    # Coming up.

    def load(self, progress: Callable[[int], None] | None = None) -> WorkerDescription:
        """Join the group and load this rank's shard; `progress` gets the bytes read.

        Raises ValueError, in one line, for a model or a combination of options that cannot be served.
        """
        config = self.config
        folder = Path(config.model_dir)
        self._device = _device(config)
        self._threads = config.threads or max(1, (os.cpu_count() or 1) // config.world_size)
        self._dtype = choose_dtype(config.dtype, self._device, folder)
        self._kv_dtype = choose_kv_dtype(config.kv_dtype, self._dtype, self._device)
        self._attend = make_attention(config.attention, self._device.type, self._dtype, self._kv_dtype)
        if self._device.type == "cpu":
            prepare_drawing()
            prepare_elementwise()
            prepare_greedy()
            # After the kernels' first calls: numba starts OpenMP threads, which makes this thread forget the number.
            torch.set_num_threads(self._threads)
        self.block_size = config.block_size or PAGE_SIZE[self._device.type]
        check_page_size(self.block_size, self._device.type)
        model_config = read_config(folder)
        longest = model_config.max_position_embeddings
        self.max_model_len = config.max_model_len or longest
        if self.max_model_len > longest:
            raise ValueError(f"max_model_len {self.max_model_len} is beyond the model's {longest} positions")
        check_degree(model_config, config.world_size)  # before joining: the others may never come
        self.ranks = Ranks(config.rank, config.world_size, self._device.type, config.rendezvous)
        self.model = LlamaModel(
            folder, model_config, self.ranks, self._device, self._dtype, self.max_model_len, progress
        )
        self._constraints = Constraints(folder, model_config.vocab_size)
        self._iteration_bytes = self._worst_iteration()
        if config.alone_on_host and self._device.type == "cpu":
            hold_processors(self._threads, config.rank, config.world_size)
        give_back()
        return self._describe()

    def _worst_iteration(self) -> int:
        """Bytes that the largest iteration takes. Raises ValueError where it does not fit the device."""
        sizes = self.config.max_batched_tokens, self.config.max_running, self.max_model_len

        def ready(shape: Shape, sample: bool) -> Callable[[], object]:
            self.allocate(-(-max(map(sum, shape)) // self.block_size))
            return lambda: self.execute(plan_of(shape, self.block_size, sample))

        try:
            if self._device.type == "cuda":
                return on_cuda(ready(worst_shape(*sizes), True), self._device)
            return by_counting(ready, *sizes)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"an iteration of {sizes[0]} tokens does not fit beside the weights; lower --max-batched-tokens"
            ) from None
        finally:
            self._cache = self._slots = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _describe(self) -> WorkerDescription:
        shard: Shard = self.model.shard
        of_layers = len(self.model.layers), self.block_size, shard.kv_heads.size, shard.head_dim
        of_one_layer = bytes_per_block(1, *of_layers[1:], self._dtype)
        return WorkerDescription(
            rank=self.ranks.rank,
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            kv_dtype=name_of(self._kv_dtype),
            attention=self._attend.name,
            collectives=self.ranks.collectives,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.model.config.vocab_size,
            layers=len(self.model.layers),
            query_heads=shard.query_heads.size,
            kv_heads=shard.kv_heads.size,
            weight_bytes=self.model.bytes_read,
            kv_bytes_per_block=bytes_per_block(*of_layers, self._kv_dtype),
            kv_reading_bytes_per_block=0 if self._attend.reads_as_stored else of_one_layer,
            free_bytes=_free_bytes(self._device),
            host_free_bytes=_free_bytes(torch.device("cpu")),
            iteration_bytes=self._iteration_bytes,
            threads=self._threads,
            pid=os.getpid(),
        )

    def allocate(self, num_blocks: int, swap_blocks: int = 0) -> None:
        """Take the memory for the KV pages, for `swap_blocks` more on the host, and for the slots. Raises ValueError
        where it cannot be had."""
        shard = self.model.shard
        self._host = None
        self._cache = KvCache(
            len(self.model.layers),
            num_blocks,
            self.block_size,
            shard.kv_heads.size,
            shard.head_dim,
            self._kv_dtype,
            self._device,
        )
        if swap_blocks:
            self._host = HostCache(self._cache, swap_blocks)
        self._slots = Slots(self.config.max_running, self.max_model_len, self.block_size)
        self._transfer = None

    @property
    def transfer(self) -> KvTransfer:
        """Of this rank's pages to ranks of other groups. Raises PlanError before there are any."""
        if self._cache is None:
            raise PlanError("allocate the KV pool first")
        with self._making_transfer:
            if self._transfer is None:
                self._transfer = KvTransfer(
                    make_pages(self._cache), self.model.shard.kv_heads, self._device, time.perf_counter
                )
        return self._transfer

    def close(self) -> None:
        self.ranks.close()

    # Executing.

    def execute(self, plan: IterationPlan) -> IterationResult:
        """Run a plan: releases, admissions, swaps, then its forwards in order. Raises PlanError for one that
        contradicts what this worker knows; what goes wrong with one sequence is in the result's `errors`."""
        if self._slots is None or self._cache is None:
            raise PlanError("allocate the KV pool first")
        for slot in plan.releases:
            self._slots.release(slot)
            self._constraints.release(slot)
        for admission in plan.admissions:
            self._slots.admit(admission, self._cache.blocks)
            self._constraints.admit(admission.slot, admission.sampling)
        for swap in plan.swaps:
            if self._host is None:
                raise PlanError("a swap where no host memory is")
            self._host.carry_out(swap)
        sampled: list[Sampled] = []
        scored: list[tuple[TokenLogprob, ...]] = []
        seconds: list[float] = []
        for forward in plan.forwards:
            started = time.perf_counter()
            sampled += self._forward(forward, self._slots, scored)
            seconds.append(time.perf_counter() - started)
        if self._transfer is not None:
            self._transfer.computed()
        return IterationResult(
            plan.iteration,
            tokens=tuple(s.token for s in sampled),
            logprobs=tuple((i, s.logprob) for i, s in enumerate(sampled) if s.logprob is not None),
            errors=tuple((i, s.error) for i, s in enumerate(sampled) if s.error is not None),
            forward_s=tuple(seconds),
            prompt_logprobs=tuple(scored),
        )

    def _forward(self, forward: Forward, slots: Slots, scored: list[tuple[TokenLogprob, ...]]) -> list[Sampled]:
        """What is sampled; log-probabilities of prompts are added to `scored`."""
        assert self._cache is not None  # allocated together with the slots
        batch = slots.batch(forward, self._cache.blocks, self.block_size)
        positions = token_positions(batch.starts, batch.counts)
        tokens = slots.tokens[np.repeat(batch.slots, batch.counts), positions]
        layout = make_layout(batch.starts, batch.counts, slots.tables[batch.slots], self.block_size, self._device)
        last_rows = torch.from_numpy((np.cumsum(batch.counts)[batch.sampling] - 1).astype(np.int64)).to(self._device)
        whole = any(chunk.score for chunk in forward.chunks) or len(last_rows) == len(tokens)
        hidden = self.model.hidden(
            torch.from_numpy(tokens).to(self._device),
            torch.from_numpy(positions).to(self._device),
            self._cache,
            self._attend,
            layout,
            None if whole else last_rows,
        )
        scored += self._score(forward, batch, hidden, slots)
        logits = self.model.logits(hidden.index_select(0, last_rows) if whole else hidden)
        return self._sample(logits, batch.slots[batch.sampling], slots)

    def _score(self, forward: Forward, batch: Batch, hidden: Tensor, slots: Slots) -> list[tuple[TokenLogprob, ...]]:
        """Of the chunks that say so, log-probabilities of their prompts' tokens, from `hidden` of the whole batch."""
        found = []
        for index, chunk in enumerate(forward.chunks, len(forward.decodes)):
            if chunk.score:
                params, end = slots.sampling[chunk.slot], chunk.start + chunk.count
                assert params is not None  # the batch was built from taken slots
                following = slots.tokens[chunk.slot, chunk.start + 1 : min(end + 1, slots.prompt_lengths[chunk.slot])]
                first_row = int(batch.counts[:index].sum())
                most_rows = min(MOST_ROWS, self.config.max_running)  # for as many there is memory to sample from
                found.append(
                    score(
                        lambda rows: self.model.logits(hidden.index_select(0, rows.to(self._device))),
                        first_row,
                        following,
                        params.prompt_logprobs or 0,
                        most_rows,
                    )
                )
        return found

    def _sample(self, logits: Tensor, sampled_slots: NDArray[np.int64], slots: Slots) -> list[Sampled]:
        rows = []
        for slot in sampled_slots.tolist():
            params = slots.sampling[slot]
            assert params is not None  # the batch was built from taken slots
            rows.append(self._row(slot, params, slots))
        sampled = sample(logits, rows)
        slots.append(sampled_slots, np.array([max(0, s.token) for s in sampled], dtype=np.int64))
        return sampled

    def _row(self, slot: int, params: SamplingParams, slots: Slots) -> Row:
        tokens, prompt = slots.tokens[slot, : slots.lengths[slot]], int(slots.prompt_lengths[slot])
        try:
            return Row(params, tokens, prompt, self._constraints.allowed(slot, tokens[prompt:]))
        except GrammarError as error:
            return Row(params, tokens, prompt, refusal=f"the response format cannot be kept: {error}")


def _device(config: WorkerConfig) -> torch.device:
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("no CUDA device is visible; take --device cpu")
        index = config.rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if kind != "cpu":
        raise ValueError(f"unknown device {kind!r}; choose one of auto, cpu, cuda")
    return torch.device("cpu")


def choose_dtype(name: str, device: torch.device, folder: Path) -> torch.dtype:
    """float32 on CPU, where nothing narrower is fast without special instructions. On CUDA the checkpoint's own, or
    bfloat16 for one in float32, which the attention kernels there do not take. Raises ValueError."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto" and name not in names:
        raise ValueError(f"unknown dtype {name!r}; choose one of auto, {', '.join(names)}")
    if device.type == "cpu":
        return names.get(name, torch.float32)
    if name == "float32":
        raise ValueError("the attention kernels on CUDA do not take float32; take --dtype bfloat16 or float16")
    own = names.get(name, checkpoint_dtype(folder))
    return own if own in (torch.bfloat16, torch.float16) else torch.bfloat16


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)
