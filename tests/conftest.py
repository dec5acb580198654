"""What all tests share: how long Hypothesis may take, who compiles kernels, that Ctrl-C is heard, S3 servers, torch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests import turns
from tests.servers import NoServer, Server, running

_CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("short", max_examples=40, **_CALM)
settings.register_profile("long", max_examples=20_000, **_CALM)
settings.register_profile(  # for mutants: the first example that fails will do
    "first", max_examples=40, phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False, **_CALM
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background may have it ignored


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-in", type=int, default=1, metavar="N", help="run one of N long tests; another one after each commit"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests that do not have their turn."""
    marks = {item: item.get_closest_marker("long") for item in items}
    taking_turns = [item for item, mark in marks.items() if mark is not None and not mark.kwargs.get("every_time")]
    left_out = {*taking_turns} - {*turns.in_turn(taking_turns, config.getoption("--one-in"))}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module", params=["moto", pytest.param("seaweedfs", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(running(request.param, tmp_path_factory.mktemp(request.param)))
        except NoServer as error:
            pytest.skip(str(error))
        yield found


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """A run in this process asks torch for one thread and for determinism; other tests should not notice."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
