"""What is slow or noisy to measure: run by hand, with the command in each module's docstring."""

import workers  # noqa: F401  # before torch is loaded: it says how torch's threads wait, here as where it serves
