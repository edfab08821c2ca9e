"""Computes. torch and torch.distributed; transformers for tokenizers alone, which no rank has. Knows no ray."""

import os
from pathlib import Path

from workers.caches import kernels_dir

# libgomp's threads wait for each other by turning, by default for a whole time slice: a processor is then kept busy
# while the thread that is waited for gets none, and one foreign process makes steps many times as long. This many turns
# are some microseconds, longer than most waits within a forward; with five times as many a step on a quiet machine is a
# little shorter, and twice as long beside a busy program. It has to be said before torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Weights and KV in pages of 2 MiB where the kernel gives them to those that ask (Linux, `madvise`, which is the usual
# setting): a forward reads all of them, and with pages of 4 KiB spends some 7 % of its time on looking these up.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Compiled kernels, by all that they are made of, unless the operator has a place for them; what an older version said
# to a process that started this one does not hold. It has to be said before numba is loaded.
_kernels = kernels_dir(Path(__file__).parent)
if Path(os.environ.get("NUMBA_CACHE_DIR") or _kernels).parent == _kernels.parent:
    os.environ["NUMBA_CACHE_DIR"] = str(_kernels)
