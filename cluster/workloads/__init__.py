"""Load as pure data: when requests are due and how long they are. Seeded and deterministic; no HTTP, no Ray, no clock.

The load test sends it to a server over HTTP; whatever else consumes requests in time can take the same.
"""

from cluster.workloads.arrivals import each_gamma, each_ramp, gamma, poisson, ramp
from cluster.workloads.build import each_request, interference, requests
from cluster.workloads.lengths import Fixed, Lengths, LogNormal, Uniform, parse_lengths
from cluster.workloads.planned import ClosedLoop, Interference, OpenLoop, PlannedRequest, Workload
from cluster.workloads.prompts import RandomPrompt
from cluster.workloads.traces import TraceRow, read_trace, replay

__all__ = [
    "ClosedLoop",
    "Fixed",
    "Interference",
    "Lengths",
    "LogNormal",
    "OpenLoop",
    "PlannedRequest",
    "RandomPrompt",
    "TraceRow",
    "Uniform",
    "Workload",
    "each_gamma",
    "each_ramp",
    "each_request",
    "gamma",
    "interference",
    "parse_lengths",
    "poisson",
    "ramp",
    "read_trace",
    "replay",
    "requests",
]
