"""Large objects go up in parts: seen from the servers' side, and when some part of the way is bad."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sparserl.errors import Unavailable
from tests.servers import QUICK, NoServer, Proxy, Server, running

SIZE = 23_000_000  # five parts of 5 MiB, the last one smaller


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(running(request.param, tmp_path_factory.mktemp(request.param)))
        except NoServer as error:
            pytest.skip(str(error))


def uploads(proxy: Proxy) -> tuple[int, int, int]:
    """How many uploads in parts were begun, completed and aborted on the way through a proxy."""
    begun = sum(line.startswith("POST") and "?uploads" in line for line in proxy.seen)
    completed = sum(line.startswith("POST") and "uploadId=" in line for line in proxy.seen)
    aborted = sum(line.startswith("DELETE") and "uploadId=" in line for line in proxy.seen)
    return begun, completed, aborted


def test_large_objects_go_up_in_parts_and_come_back_whole(server: Server) -> None:
    """Servers give an object that was put together of N parts an ETag that ends in -N; a small one has none such."""
    data = os.urandom(SIZE)
    store = server.store(uuid.uuid4().hex)
    store.put("large", memoryview(data))
    store.put("small", data[:1000])
    large, small = store.get("large", SIZE), store.get("small", 1000)
    assert re.fullmatch(r'"[0-9a-f]{32}-5"', large.tag)
    assert re.fullmatch(r'"[0-9a-f]{32}"', small.tag)
    assert large.data == data
    assert store.read("large", (5 << 20) - 3, 7) == data[(5 << 20) - 3 : (5 << 20) + 4]
    assert [(item.name, item.size) for item in store.list("l")] == [("large", SIZE)]


def test_when_a_part_fails_all_parts_are_sent_again(server: Server) -> None:
    """The object is put whole, and the uploads that failed are aborted, so that their parts take no room."""
    place, data = uuid.uuid4().hex, os.urandom(SIZE)
    failures = ["503", "reset"]

    def trouble(line: str) -> str:
        return failures.pop() if failures and "partNumber=3" in line else ""

    with Proxy(server, trouble) as proxy:
        server.store(place, proxy.endpoint, QUICK).put("large", data)
        assert not failures
        assert uploads(proxy) == (3, 1, 2)
    assert server.store(place).get("large", SIZE).data == data


def test_parts_that_never_get_through_make_no_object(server: Server) -> None:
    """Where a part fails for good, so does the put; every upload that was begun is aborted."""
    place, few = uuid.uuid4().hex, replace(QUICK, attempts=2)
    with Proxy(server, lambda line: "503" if "partNumber=2" in line else "") as proxy:
        with pytest.raises(Unavailable, match="after 2 attempts"):
            server.store(place, proxy.endpoint, few).put("large", os.urandom(SIZE))
        assert uploads(proxy) == (2, 0, 2)
    assert list(server.store(place).list("")) == []
