"""What all tests share: how long Hypothesis may take, and that Ctrl-C is heard."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

_CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("short", max_examples=100, **_CALM)
settings.register_profile("long", max_examples=20_000, **_CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background may have it ignored
