"""What a decode worker knows of a transfer: the whole table, and each event at the wrong time."""

from __future__ import annotations

import itertools

import pytest

from decode.intake import TABLE, Intake, IntakeEvent, IntakeState, Staged, Transfer
from kvtransfer.machine import InvalidTransition
from protos.errors import Code, SplitpointError
from protos.ids import TransferId
from protos.splitpoint.v1 import kv_transfer_pb2

ID = TransferId(bytes(range(16)))
STAGED = Staged(seals=(kv_transfer_pb2.Seal(),), bytes=10, seconds=0.1, transport="grpc")
FAILED = SplitpointError(Code.TRANSFER_FAILED, "peer_lost")
S, E = IntakeState, IntakeEvent


def prepared(intake: Intake, transfer_id: TransferId = ID) -> Transfer:
    return intake.prepare(transfer_id, attempt_id="a", prompt_tokens=5, token_hash=b"h", prefill_incarnation="p", now=0.0)


def brought_to(intake: Intake, state: IntakeState) -> Transfer:
    transfer = prepared(intake)
    if state is S.PREPARED:
        return transfer
    intake.pulling(transfer, 1.0)
    if state in (S.STAGED, S.CONSUMED):
        assert intake.arrived(transfer, STAGED, 2.0)
    if state is S.CONSUMED:
        intake.claim(ID)
        intake.consume(transfer, 3.0)
    if state is S.FAILED:
        assert intake.failed(transfer, FAILED, 2.0)
    if state is S.RELEASED:
        assert intake.release(ID, "test", 2.0) is transfer
    assert transfer.state is state
    return transfer


def test_the_table_is_all_there_is() -> None:
    legal = {
        (S.PREPARED, E.PULL, S.PULLING),
        (S.PREPARED, E.FAIL, S.FAILED),
        (S.PULLING, E.STAGED, S.STAGED),
        (S.PULLING, E.FAIL, S.FAILED),
        (S.STAGED, E.CONSUME, S.CONSUMED),
        *((state, E.RELEASE, S.RELEASED) for state in S if state is not S.RELEASED),
    }
    assert {(state, event, target) for (state, event), target in TABLE.items()} == legal


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_every_event_in_every_state(state: IntakeState, event: IntakeEvent) -> None:
    intake = Intake()
    transfer = brought_to(intake, state)
    legal = (state, event) in TABLE
    if event is E.STAGED:
        assert intake.arrived(transfer, STAGED, 5.0) is legal
    elif event is E.FAIL:
        assert intake.failed(transfer, FAILED, 5.0) is legal
    elif event is E.RELEASE:
        assert (intake.release(ID, "x", 5.0) is not None) is legal
    elif legal:
        (intake.consume if event is E.CONSUME else intake.pulling)(transfer, 5.0)
    else:
        with pytest.raises(InvalidTransition, match="story"):
            (intake.consume if event is E.CONSUME else intake.pulling)(transfer, 5.0)
    assert transfer.state is (TABLE[state, event] if legal else state)
    late = {E.STAGED: "late_staged", E.FAIL: "late_fail"}.get(event)
    assert intake.counts[late or ""] == (late is not None and not legal)


def test_an_id_is_prepared_once_also_after_its_end() -> None:
    intake = Intake()
    prepared(intake)
    for _ in range(2):
        with pytest.raises(SplitpointError) as refused:
            prepared(intake)
        assert refused.value.code is Code.TRANSFER_REFUSED
        intake.release(ID, "over", 1.0)
    assert intake.counts["prepare_duplicate"] == 2


def test_one_decode_leg_takes_charge() -> None:
    intake = Intake()
    transfer = brought_to(intake, S.PULLING)
    assert intake.claim(ID) is transfer
    with pytest.raises(SplitpointError, match="claimed"):
        intake.claim(ID)
    intake.release(ID, "decode_ended", 3.0)
    with pytest.raises(SplitpointError, match="released \\(decode_ended\\)"):
        intake.claim(ID)
    with pytest.raises(SplitpointError, match="not known"):
        intake.claim(TransferId(bytes(16)))
    assert intake.counts == {"decode_late": 2, "decode_unknown": 1}


def test_failed_transfers_hold_nothing_but_are_known() -> None:
    intake = Intake()
    transfer = brought_to(intake, S.FAILED)
    assert intake.holding() == 0
    assert intake.known() == [ID]
    assert intake.claim(ID).error is FAILED
    assert intake.release(ID, "decode_ended", 3.0) is transfer
    assert len(intake) == 0


def test_release_is_idempotent() -> None:
    intake = Intake()
    brought_to(intake, S.STAGED)
    assert intake.holding() == 1
    assert intake.release(ID, "a", 3.0) is not None
    assert intake.release(ID, "b", 4.0) is None
    assert intake.release(TransferId(bytes(16)), "c", 4.0) is None
