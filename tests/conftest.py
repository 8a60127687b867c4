"""Hypothesis profiles and one torch thread, so that runs are bit-stable and fit two cores."""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import torch  # noqa: E402 - the thread counts come first
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(1)

settings.register_profile(
    "gate", max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("night", settings.get_profile("gate"), max_examples=2000)
settings.load_profile(os.environ.get("SPECVERIFY_PROFILE", "gate"))
