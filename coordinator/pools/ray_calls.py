"""Calls that ask Ray's GCS: on threads of their own and with a deadline.

While the GCS is away each of them waits for up to a minute. On the common threads they would keep everybody else's work waiting,
the killing of a worker's processes among it; without a deadline, whoever asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

GCS_TIMEOUT_S = 5.0
_threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="gcs")
P = ParamSpec("P")
T = TypeVar("T")


async def gcs_call(call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """What `call` returns; it is called on a thread.

    Raises:
        TimeoutError: no answer within `GCS_TIMEOUT_S`. A call that had begun may still take effect: it is one to be repeated.
    """
    async with asyncio.timeout(GCS_TIMEOUT_S):
        return await gcs_call_unbounded(call, *args, **named)


async def gcs_call_unbounded(call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """The same without a deadline, for what must not be done twice and nobody waits for."""
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: call(*args, **named))
