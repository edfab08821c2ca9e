"""The load test of an OpenAI-compatible server, as a library. `stallfree bench` is its command line.

    from cluster.workloads import OpenLoop, Uniform, poisson, requests
    from deploy.bench import SloTargets, Target, as_json, drive, figures

    times = poisson(rate=2, duration_s=30, seed=0)
    workload = OpenLoop(requests(times, Uniform(64, 1024), Uniform(16, 64), seed=0))
    run = await drive(Target("http://127.0.0.1:8000"), workload)
    found = figures(run, SloTargets(ttft_s=2.0, tpot_s=0.1))
    print(found.ttft.p99, found.attainment, found.goodput_per_s, found.errors)

All times are seconds; `as_json` gives milliseconds with the unit in the name.
"""

from cluster.workloads import ClosedLoop, Interference, OpenLoop, PlannedRequest, RandomPrompt, Workload
from deploy.bench.drive import drive
from deploy.bench.figures import Figures, figures
from deploy.bench.intrusion import Intrusion
from deploy.bench.kinds import KindFigures
from deploy.bench.monitor import Progress
from deploy.bench.record import RequestRecord, RunRecord
from deploy.bench.report import as_json
from deploy.bench.slo import SloTargets
from deploy.bench.spread import Spread
from deploy.bench.target import Target

__all__ = [
    "ClosedLoop",
    "Figures",
    "Interference",
    "Intrusion",
    "KindFigures",
    "OpenLoop",
    "PlannedRequest",
    "Progress",
    "RandomPrompt",
    "RequestRecord",
    "RunRecord",
    "SloTargets",
    "Spread",
    "Target",
    "Workload",
    "as_json",
    "drive",
    "figures",
]
