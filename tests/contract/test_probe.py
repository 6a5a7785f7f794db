"""A probe's three answers: the worker, its host alone, nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from coordinator.pools.probe import Answer, dial, probe
from coordinator.routing.views import Role, WorkerView
from protos.ids import Incarnation, WorkerId
from tests.support.views import worker_view
from tests.support.workers import running, start_worker

pytestmark = pytest.mark.timeout(60)
TIMEOUT_S = 0.5


def view(address: str, incarnation: str = "some") -> WorkerView:
    return replace(worker_view(WorkerId("decode-1"), Role.DECODE), address=address, incarnation=Incarnation(incarnation))


@pytest.fixture
def mute() -> Iterator[str]:
    """A port that its kernel answers for and its process does not, as of one that was stopped."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_the_worker_answers_and_another_incarnation_does_not_count() -> None:
    served = await start_worker(None, "decode-1", wire=True)
    async with running(served):
        address, incarnation = served.address, served.server.identity.incarnation
        assert await probe(view(address, incarnation), 5.0, None) is Answer.WORKER
        assert await probe(view(address, "former"), 5.0, None) is Answer.HOST


async def test_a_stopped_process_leaves_its_host_to_answer(mute: str) -> None:
    assert await probe(view(mute), TIMEOUT_S, None) is Answer.HOST
    assert await dial(mute, TIMEOUT_S) is None


async def test_a_dead_process_is_refused_by_its_host() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert await probe(view(address), TIMEOUT_S, None) is Answer.HOST
        assert isinstance(await dial(address, TIMEOUT_S), ConnectionRefusedError)


@pytest.fixture
def silent() -> Iterator[str]:
    """A port whose kernel drops what comes, as a network that is cut does: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        full = False
        while not full:
            client = stack.enter_context(socket.socket())
            client.settimeout(0.2)
            try:
                client.connect(address)
            except TimeoutError:
                full = True
        yield f"{address[0]}:{address[1]}"


async def test_a_host_that_is_not_there_is_silent(silent: str) -> None:
    assert await probe(view(silent), TIMEOUT_S, None) is Answer.NOTHING
    assert isinstance(await dial(silent, TIMEOUT_S), TimeoutError)
