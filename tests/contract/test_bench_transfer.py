"""The benchmark's own paths between two processes: small, for their bytes and their endings, never for their speed."""

from __future__ import annotations

import importlib.util
import os

import pytest

from coordinator.bench import transfer
from coordinator.bench.transfer import BOUNDS, MEMORY, NIXL, Outcome, Plan
from kvtransfer.bench.halves import Pair, PathError, PathSpec
from kvtransfer.bench.shape import MIB, REAL, SYNTHETIC, Case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OURS = "kvtransfer.bench.ours"
SPECS = {
    "ucx": PathSpec("ucx", OURS, (("transport", "ucx"),)),
    "grpc": PathSpec("grpc", OURS, (("transport", "grpc"),)),
    "stream": PathSpec("stream", "kvtransfer.bench.grpc_stream", (("message_bytes", MIB),)),
    "bound": PathSpec("bound", "kvtransfer.bench.bounds"),
    "nixl": PathSpec("nixl", "kvtransfer.bench.nixl_read"),
}
NEEDS = {"ucx": "ucxx", "nixl": "nixl_cu12"}


@pytest.mark.parametrize("name", SPECS)
def test_a_path_moves_its_bytes_and_ends(name: str) -> None:
    library = NEEDS.get(name)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    cores = sorted(os.sched_getaffinity(0))
    pair = Pair(SPECS[name], {"sender": cores[:1], "receiver": cores[-1:]} if name == "ucx" else None)
    try:
        pair.start()
        cases = [Case(REAL.name, 6 * MIB, 2, what="readv_crc32c" if name == "bound" else "")]
        if name == "bound":
            cases += [Case(REAL.name, 6 * MIB, 2, what=what) for what in ("memcpy_crc32c", "at once")]
        if name in ("ucx", "grpc", "stream"):
            cases.append(Case(REAL.name, 6 * MIB, 2, staged=True))
        if name in ("ucx", "nixl"):
            cases.append(Case(SYNTHETIC.name, 3 * MIB, 2))
        if name == "ucx":
            cases.append(Case(REAL.name, 6 * MIB, 2, check=False))
        for case in cases:
            pair.pause()
            pair.resume()
            assert pair.run(case) > 0
            if not case.staged:
                pair.verify(case)
    finally:
        pair.close()


def test_a_peer_that_fails_is_missing_and_one_of_ours_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(sizes=(2,), repeats=1, model=os.path.devnull)  # type: ignore[arg-type]
    broken = "kvtransfer.bench.no_such_path"
    good = PathSpec(MEMORY, "kvtransfer.bench.bounds")

    def measure(*specs: PathSpec) -> Outcome:
        monkeypatch.setattr(transfer, "specs", lambda _: (list(specs), {}))
        return transfer.measure(plan, lambda _: None, lambda *_: None)

    outcome = measure(good, PathSpec(NIXL, broken))
    assert "no_such_path" in outcome.missing[NIXL]
    assert {sample.path for sample in outcome.samples} == set(BOUNDS)
    with pytest.raises(PathError, match="no_such_path"):
        measure(PathSpec("grpc", broken))
