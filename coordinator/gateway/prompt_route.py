"""Where one choice's prompt is computed: asked of routing, and told back to it. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.routing.goals import Goal, Refusal, Route, workers_of
from coordinator.routing.policies import Ask
from coordinator.routing.router import Router


class PromptRoute:
    """The routes of one choice, one after the other. Routing learns from it what each worker's prefix cache holds."""

    def __init__(self, router: Router, prompt_token_ids: Sequence[int], session: str, *, reads_cache: bool = True) -> None:
        self._router = router
        self._ask = router.ask(prompt_token_ids, session, reads_cache=reads_cache)
        self._waiting: Route | None = None
        """The route whose first worker was given the prompt and has not answered yet."""

    @property
    def ask(self) -> Ask:
        """What the policy may know of it."""
        return self._ask

    @property
    def expected_cached_tokens(self) -> int:
        """Of the prompt, at the worker that is to compute it."""
        return self._waiting.expected_cached_tokens if self._waiting is not None else 0

    def choose(self, goals: Sequence[Goal], now_s: float) -> Route | Refusal:
        """The next route."""
        self.failed()
        route = self._router.choose(goals, now_s, self._ask)
        self._waiting = None if isinstance(route, Refusal) else route
        return route

    def failed(self) -> None:
        """The present route is over. What its worker had not computed is not in its cache."""
        route, self._waiting = self._waiting, None
        if route is not None:
            self._router.prompt_lost(workers_of(route)[0].incarnation, self._ask)

    def computed(self, cached_tokens: int) -> None:
        """The prompt's first token came, with the engine's word on how much of the prompt was cached."""
        route, self._waiting = self._waiting, None
        if route is not None:
            self._router.prompt_computed(
                workers_of(route)[0].incarnation,
                self._ask,
                expected_cached_tokens=route.expected_cached_tokens,
                cached_tokens=cached_tokens,
            )
