"""Stop strings: what is shown, what is held back, what ends the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.gateway.stop import StopStrings


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What each piece makes visible, the flush at the end included, and the match."""
    matcher = StopStrings(stops, include_in_output=include)
    shown = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            return shown, matched
    return [*shown, matcher.flush()], None


def test_text_without_a_match_is_shown_whole() -> None:
    assert run(["one ", "two ", "three"], ["XYZ"]) == (["one ", "two ", "three", ""], None)


def test_a_match_inside_one_piece_cuts_before_it() -> None:
    assert run(["keep END drop"], ["END"]) == (["keep "], "END")


def test_a_possible_beginning_is_held_back_and_shown_when_it_is_none() -> None:
    assert run(["a E", "N", "x"], ["END"]) == (["a ", "", "ENx", ""], None)


def test_a_match_across_pieces_never_shows_its_beginning() -> None:
    assert run(["a E", "N", "D b"], ["END"]) == (["a ", "", ""], "END")


def test_what_is_held_back_comes_with_the_flush() -> None:
    assert run(["abc", "EN"], ["END"]) == (["abc", "", "EN"], None)


def test_included_stop_strings_are_shown_and_hold_nothing_back() -> None:
    assert run(["a E", "N", "D b"], ["END"], include=True) == (["a E", "N", "D"], "END")


def test_the_first_to_complete_wins() -> None:
    assert run(["xaby"], ["aby", "b"]) == (["xa"], "b")


def test_of_two_that_complete_together_the_first_listed_wins() -> None:
    assert run(["xab"], ["ab", "b"]) == (["x"], "ab")
    assert run(["xab"], ["b", "ab"]) == (["xa"], "b")


def test_overlapping_beginnings_keep_the_longest() -> None:
    assert run(["aab", "a", "abc"], ["aabaab!", "abc"]) == (["", "", "aaba"], "abc")


def test_a_repeated_prefix_still_matches() -> None:
    assert run(["aa", "aab"], ["aab"]) == (["", "aa"], "aab")


def test_unarmed_text_does_not_match_but_a_later_completion_does() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("END E", armed=False) == ("END ", None)
    assert matcher.push("N", armed=False) == ("", None)
    assert matcher.push("D!") == ("", "END")


def test_a_match_that_was_partly_shown_unarmed_cuts_at_what_was_shown() -> None:
    matcher = StopStrings(["abcd"], include_in_output=True)
    assert matcher.push("ab", armed=False) == ("ab", None)
    assert matcher.push("cd more") == ("cd", "abcd")


@pytest.mark.parametrize("stop", ["\n\n", "🙂", "é"])
def test_characters_are_the_unit_not_bytes(stop: str) -> None:
    assert run([f"a{stop[:1]}", stop[1:] + "z"], [stop])[1] == stop


ALPHABET = "ab"


@given(
    st.lists(st.text(ALPHABET, max_size=3), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    ends = [(text.find(s) + len(s), order, s) for order, s in enumerate(stops) if s in text]
    shown, matched = run(pieces, stops, include=include)
    if not ends:
        assert (matched, "".join(shown)) == (None, text)
        return
    end, _, stop = min(ends)
    assert matched == stop
    assert "".join(shown) == text[: end if include else end - len(stop)]


@given(st.lists(st.text(ALPHABET, max_size=3), max_size=12), st.text(ALPHABET, min_size=1, max_size=4))
def test_nothing_is_held_back_without_need(pieces: list[str], stop: str) -> None:
    matcher = StopStrings([stop])
    fed = shown = ""
    for piece in pieces:
        fed += piece
        text, matched = matcher.push(piece)
        shown += text
        if matched is not None:
            return
        held = fed[len(shown) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)
