"""What all tests share: how long Hypothesis may take."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("short", max_examples=100, **_CALM)
settings.register_profile("long", max_examples=20_000, **_CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
