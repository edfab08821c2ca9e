"""Every way to schedule on equal resources under the same load, as a library. `stallfree compare` is its command line.

    from cluster.config import EngineConfig
    from cluster.workloads import interference
    from deploy.compare import Load, Plan, compare, configurations, simulated_on, verdict

    base = EngineConfig(model="Llama-3.1-8B", groups=2)
    plan = Plan(base, configurations(["whole", "slo"]), [Load("", interference(8, 4096))])
    found = compare(plan, simulated_on("A100-80", base))
    print(verdict(found), found.compared[0].runs[0].figures.attainment)

All times are seconds; `as_json` gives milliseconds with the unit in the name.
"""

from deploy.compare.comparison import Compared, Comparison, Load, Measured, Plan
from deploy.compare.configuration import Configuration, configurations
from deploy.compare.ground import Ground, Session
from deploy.compare.html import page
from deploy.compare.report import as_json
from deploy.compare.resources import Resources
from deploy.compare.runner import compare
from deploy.compare.simulated import simulated_on
from deploy.compare.verdict import verdict

__all__ = [
    "Compared",
    "Comparison",
    "Configuration",
    "Ground",
    "Load",
    "Measured",
    "Plan",
    "Resources",
    "Session",
    "as_json",
    "compare",
    "configurations",
    "page",
    "simulated_on",
    "verdict",
]
