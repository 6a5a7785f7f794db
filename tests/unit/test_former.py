"""What a relabelled worker still does of its former role, followed leg by leg."""

from __future__ import annotations

from coordinator.pools.former import FormerWork
from coordinator.routing.views import Role
from engine.worker.attempts import Work

PREPARING, WAITING, DECODING = [Work("prepare", "t1"), Work("decode", "t1")], [Work("decode", "t1")], [Work("decode", "t1")]
WHOLE, LATER = Work("colocated", "a1"), Work("colocated", "a2")


def test_a_request_that_was_prepared_before_is_followed_to_the_end_of_its_decode_leg() -> None:
    former = FormerWork()
    former.relabelled([*PREPARING, WHOLE])
    seen = [former.left([*now, LATER], Role.COLOCATED) for now in ([*PREPARING, WHOLE], [*WAITING, WHOLE], DECODING, [])]
    assert seen == [2, 2, 1, 0], "each request once, and none that came under the new label"


def test_what_a_late_gateway_still_sends_for_the_old_role_is_counted() -> None:
    former = FormerWork()
    former.relabelled([])
    assert former.left([Work("prepare", "t2"), LATER], Role.PREFILL) == 1
    assert former.left([Work("decode", "t2")], Role.PREFILL) == 1
    assert former.left([Work("prefill", "t3")], Role.PREFILL) == 0
    assert former.left([Work("prefill", "t3")], Role.DECODE) == 1


def test_between_two_pools_of_one_role_only_what_ran_is_former() -> None:
    former = FormerWork()
    former.relabelled(DECODING)
    assert former.left([*DECODING, Work("decode", "t9")], Role.DECODE) == 1
