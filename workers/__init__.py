"""Computes. torch, torch.distributed and transformers; knows no ray."""

import os

# libgomp's threads wait for each other by turning, by default for a whole time slice: a processor is then kept busy
# while the thread that is waited for gets none, and one foreign process makes steps many times as long. This many turns
# are some microseconds, longer than most waits within a forward. It has to be said before torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
