"""What all tests share: how long Hypothesis may take, who compiles kernels, that Ctrl-C is heard, S3 servers, torch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests import effort, turns
from tests.servers import NoServer, Server, running

_CALM = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("short", max_examples=effort.BY_DAY, **_CALM)
settings.register_profile("night", max_examples=effort.AT_NIGHT, **_CALM)
settings.register_profile("long", max_examples=20_000, **_CALM)
settings.register_profile(  # for mutants: the first example that fails will do
    "first", max_examples=effort.AT_NIGHT, phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False, **_CALM
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background may have it ignored


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-in",
        type=turns.one_in,
        default=1,
        metavar="N",
        help="run one of N long tests; others after the next commit",
    )
    parser.addoption("--one-in-all", type=turns.one_in, default=1, metavar="N", help="run one of N tests, long or not")


def pytest_report_header(config: pytest.Config) -> str | None:
    one_in = config.getoption("--one-in")
    return None if one_in == 1 else f"long tests: one in {one_in}, turn {turns.turn() % one_in}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that do not have their turn."""
    one_in, one_in_all = (config.getoption(option) for option in ("--one-in", "--one-in-all"))
    if one_in == one_in_all == 1:
        return  # without asking git
    now = turns.turn()
    long_one_in = max(one_in, one_in_all)
    left_out = {
        item
        for item in items
        if not turns.has_turn(item.nodeid, long_one_in if item.get_closest_marker("long") else one_in_all, now)
    }
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def upkeep_in_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each publish waits for the upkeep behind it, so that tests find what it did; not so where a test is `behind`."""
    if request.node.get_closest_marker("behind"):
        return
    from sparserl.session.store.maintenance import Maintenance

    begin = Maintenance.begin

    def begin_and_finish(self: Maintenance, *arguments: object) -> tuple[str, ...]:
        notes = begin(self, *arguments)
        self.finish()
        return notes + self._take_notes()

    monkeypatch.setattr(Maintenance, "begin", begin_and_finish)


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
