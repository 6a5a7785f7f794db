"""What UCX does between two processes of this host: `python -m kvtransfer.transports.ucx_probe` prints one JSON object.

For `splitpoint doctor`. Two child processes, endpoints made from worker addresses as the data path makes them, a small and a
large message; UCX's own protocol report says which transport carried each. It never runs inside a serving process: UCX
reads its environment once, when it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvtransfer.transports.ucx_environment import UCX_ENVIRONMENT

SMALL_BYTES = 4 * 1024
LARGE_BYTES = 32 * 1024 * 1024
REPEATS = 4
DEADLINE_S = 15.0
SECTION = "tagged message by ucp_tag_send* from host memory"


def parse_protocols(report: str) -> list[tuple[int, float, str, str]]:
    """Rows (first byte, last byte, protocol, lane) of tagged sends from host memory in a `UCX_PROTO_INFO=y` report. Pure.

    UCX prints a table per operation, `8K..inf | rendezvous zero-copy read from remote | cma/memory`; the last one for an
    operation is the one in use.
    """
    rows: list[tuple[int, float, str, str]] = []
    inside = False
    for line in report.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:]]
        if " by ucp_" in line:
            inside = SECTION in line
            if inside:
                rows = []
        elif inside and len(cells) >= 3:
            span = re.fullmatch(r"(\w+)(?:\.\.(\w+))?", cells[0])
            if span:
                first = int(_bytes(span[1]))
                rows.append((first, _bytes(span[2]) if span[2] else first, cells[1].removeprefix("(?) "), cells[2]))
    return rows


def lane_for(rows: list[tuple[int, float, str, str]], size_bytes: int) -> str:
    """The lane that carries a message of this size, or "" when the report has none."""
    return next((lane for first, last, _, lane in rows if first <= size_bytes <= last), "")


def probe(*, error_handling: bool, deadline_s: float = DEADLINE_S, across_hosts: bool = False) -> dict[str, Any]:
    """Run one pair of processes and report `small`, `large` (lanes), `gigabytes_per_s` and, on failure, `error`.

    `across_hosts` keeps shared memory from endpoints with error handling, as it is between hosts.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        environment = {
            **UCX_ENVIRONMENT,
            **os.environ,
            "UCX_PROTO_INFO": "y",
            "UCX_LOG_FILE": f"{folder}/ucx-%p.log",
            **({"UCX_MM_ERROR_HANDLING": "n"} if across_hosts else {}),
        }
        children: dict[str, subprocess.Popen[str]] = {}
        for role in ("send", "receive"):
            command = [sys.executable, "-m", __spec__.name, "child", role, "1" if error_handling else "0", str(deadline_s)]
            pipe = subprocess.PIPE
            child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
            stack.callback(_end, child)
            children[role] = child
        try:
            addresses = {role: _answer(child, "ADDRESS", deadline_s) for role, child in children.items()}
            for role, child in children.items():
                assert child.stdin is not None
                child.stdin.write(addresses["receive" if role == "send" else "send"] + "\n")
                child.stdin.flush()
            seconds = [float(_answer(child, "DONE", deadline_s)) for child in children.values()]
        except (TimeoutError, OSError) as error:
            return {"error": str(error)}
        rows = parse_protocols("\n".join(p.read_text() for p in sorted(Path(folder).glob("ucx-*.log"))))
        return {
            "small": lane_for(rows, SMALL_BYTES),
            "large": lane_for(rows, LARGE_BYTES),
            "gigabytes_per_s": round(LARGE_BYTES / max(seconds) / 1e9, 2),
        }


def library() -> dict[str, Any]:
    """Version and the components that this UCX opened here. Loads ucxx into this process."""
    import ucxx._lib.libucxx as ucx

    context = ucx.UCXContext()
    return {
        "version": ".".join(str(part) for part in ucx.get_ucx_version()),
        "components": re.findall(r"component \d+\s*:\s+(\S+)", context.info),
        "devices": re.findall(r"-- (\S+/\S+)", context.info),
    }


def _bytes(text: str) -> float:
    if text == "inf":
        return float("inf")
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
    return int(text[:-1] if scale > 1 else text) * scale


def _end(child: subprocess.Popen[str]) -> None:
    """Closing its input ends a child that is done; one that is not is killed."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    try:
        child.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def _answer(child: subprocess.Popen[str], word: str, deadline_s: float) -> str:
    """The rest of the child's next line, which starts with `word`. Raises `TimeoutError` or `OSError` with its last words."""
    assert child.stdout is not None
    assert child.stderr is not None
    ready, _, _ = select.select([child.stdout], [], [], deadline_s)
    if not ready:
        raise TimeoutError(f"no {word.lower()} from a UCX process within {deadline_s:.0f} s")
    line = child.stdout.readline()
    if not line.startswith(word):
        child.kill()
        raise OSError((child.stderr.read().strip().splitlines() or [f"a UCX process ended without its {word.lower()}"])[-1])
    return line.removeprefix(word).strip()


def _child(role: str, error_handling: bool, deadline_s: float) -> None:
    import numpy as np
    import ucxx._lib.libucxx as ucx
    from ucxx._lib.arr import Array

    worker = ucx.UCXWorker(ucx.UCXContext())
    sys.stdout.write(f"ADDRESS {worker.address.tobytes().hex()}\n")
    sys.stdout.flush()
    peer = ucx.UCXAddress.create_from_buffer(bytes.fromhex(sys.stdin.readline()))
    endpoint = ucx.UCXEndpoint.create_from_worker_address(worker, peer, error_handling)
    give_up = time.monotonic() + deadline_s
    best_s = deadline_s
    for size_bytes in (SMALL_BYTES, LARGE_BYTES):
        payload = np.full(size_bytes, 7 if role == "send" else 0, np.uint8)
        for _ in range(REPEATS):
            begin = time.monotonic()
            tag = ucx.UCXXTag(size_bytes)
            request = endpoint.tag_send(Array(payload), tag) if role == "send" else endpoint.tag_recv(Array(payload), tag)
            while not request.completed:
                worker.progress()
                if time.monotonic() > give_up:
                    raise SystemExit("the message did not arrive")
            request.check_error()
            if size_bytes == LARGE_BYTES:
                best_s = min(best_s, time.monotonic() - begin)
        if payload[0] != 7 or payload[-1] != 7:
            raise SystemExit("the message arrived damaged")
    sys.stdout.write(f"DONE {best_s}\n")
    sys.stdout.flush()
    # The peer may still need this side's progress; the parent closes our input when both are done.
    while not select.select([sys.stdin], [], [], 0)[0]:
        worker.progress()


def main() -> None:
    """The parent's and the children's entry."""
    if sys.argv[1:2] == ["child"]:
        _child(sys.argv[2], sys.argv[3] == "1", float(sys.argv[4]))
        return
    report: dict[str, Any] = library()
    report["same_host"] = probe(error_handling=True)  # `ucx_same_host = "contained"`, the default
    report["same_host_direct"] = probe(error_handling=False)
    report["with_error_handling"] = probe(error_handling=True, across_hosts=True)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
