"""Running the choices of one public request: every one of them is ended, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from coordinator.gateway.api import Core, Tokens
from coordinator.gateway.choice import Choice, Delta
from protos.errors import SplitpointError

QUEUED_EVENTS = 64
"""Events that choices may be ahead of a client that reads slowly."""


Deltas = tuple[Choice, list[Delta]]


async def run_choices(core: Core, choices: Sequence[Choice]) -> AsyncGenerator[Deltas, None]:
    """Submit every choice and yield its deltas as they come.

    Close the iterator (`contextlib.aclosing`) to end early: that closes every choice that still runs. The first error ends all
    choices and is raised, with `tokens_sent` as the number of tokens that were yielded.
    """
    sent = 0
    reason = "client_left"
    try:
        async with contextlib.aclosing(_one(core, choices[0]) if len(choices) == 1 else _many(core, choices)) as source:
            async for item in source:
                for delta in item[1]:
                    if delta.token_id is not None:
                        sent += 1
                yield item
    except SplitpointError as error:
        reason = "failed"
        error.tokens_sent = sent
        raise
    finally:
        for choice in choices:
            if choice.generation is not None and not choice.ended:
                await choice.generation.close(reason)


async def _one(core: Core, choice: Choice) -> AsyncGenerator[Deltas, None]:
    generation = choice.generation = core.submit(choice.submission)
    events = aiter(generation)
    try:
        async for event in events:
            if not isinstance(event, Tokens):
                yield choice, [choice.end(event)]
                continue
            deltas = choice.tokens(event)
            if choice.finished:
                # A stop string matched. The engine does not know it, so the generation is ended from here, after the client
                # has its text.
                try:
                    yield choice, deltas
                finally:
                    await generation.close("stop")
                break
            if deltas:
                yield choice, deltas
        choice.ended = True
    finally:
        # A generator that is only dropped ends when it is collected, which may be any time later.
        if isinstance(events, AsyncGenerator):
            await events.aclose()


async def _many(core: Core, choices: Sequence[Choice]) -> AsyncGenerator[Deltas, None]:
    queue: asyncio.Queue[Deltas | Exception | None] = asyncio.Queue(QUEUED_EVENTS)

    async def pump(choice: Choice) -> None:
        try:
            async with contextlib.aclosing(_one(core, choice)) as source:
                async for item in source:
                    await queue.put(item)
        except Exception as exc:  # handed to the reader below, which raises it
            await queue.put(exc)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(choice), name=f"choice-{choice.index}") for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
