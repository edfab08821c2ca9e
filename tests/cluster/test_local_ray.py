"""A Ray of this process's own, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

DYING = """
import os, sys, time
import ray
from cluster.local_ray import start_ray

start_ray(num_cpus=1)

@ray.remote(max_retries=0)
def die():
    os._exit(1)

@ray.remote
class Dying:
    def __init__(self):
        os._exit(1)
    def answer(self):
        return 1

for call in (die.remote(), Dying.options(num_cpus=0).remote().answer.remote()):
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        print(type(error).__name__, file=sys.stderr)
time.sleep(2)  # what Ray has to say comes later than the exception
ray.shutdown()
"""


def test_nothing_is_printed_where_a_worker_dies() -> None:
    ran = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == ""
    assert ran.stderr.split() == ["WorkerCrashedError", "ActorDiedError"]
