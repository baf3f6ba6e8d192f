"""Stop strings: nothing of one gets out, nothing else is held back, and chunks do not matter."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.stop import StopChecker, StopMatch

texts = st.text(alphabet="ab\n", max_size=12)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def find_stop(text: str, stops: list[str]) -> StopMatch:
    """The obvious way: the shortest beginning of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return StopMatch(text[: end - len(longest)], longest)
    return StopMatch(text)


@given(st.lists(texts), stops)
@settings(max_examples=500, deadline=None)
def test_chunks_give_what_the_whole_text_gives(chunks: list[str], stops: list[str]) -> None:
    checker = StopChecker(tuple(stops))
    sent, stop = "", None
    for chunk in chunks:
        match = checker.push(chunk)
        assert not (match.text and stop), "text after the stop string"
        sent += match.text
        stop = stop or match.stop
    sent += checker.finish()
    expected = find_stop("".join(chunks), stops)
    assert (sent, stop) == (expected.text, expected.stop)


@given(st.lists(texts), stops)
@settings(max_examples=500, deadline=None)
def test_exactly_what_may_become_a_stop_string_is_held(chunks: list[str], stops: list[str]) -> None:
    checker = StopChecker(tuple(stops))
    sent, seen = "", ""
    for chunk in chunks:
        match = checker.push(chunk)
        if match.stop:
            return
        sent += match.text
        seen += chunk
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert sent == seen[: len(seen) - held]


def test_a_stop_string_over_three_chunks_never_leaks() -> None:
    checker = StopChecker(("DEFGHIJ",))
    assert [checker.push(chunk) for chunk in ("ABC", "DEF", "GH", "I", "JKL")] == [
        StopMatch("ABC"),
        StopMatch(""),
        StopMatch(""),
        StopMatch(""),
        StopMatch("", "DEFGHIJ"),
    ]
    assert checker.push("more") == StopMatch("")
    assert checker.finish() == ""


def test_a_beginning_that_is_not_continued_is_sent() -> None:
    checker = StopChecker(("DEFGHIJ",))
    assert checker.push("DEF") == StopMatch("")
    assert checker.push("x") == StopMatch("DEFx")
    assert checker.push("DE") == StopMatch("")
    assert checker.finish() == "DE"


def test_the_stop_string_that_ends_first_wins_and_then_the_longest() -> None:
    assert StopChecker(("abcd", "bc")).push("abcd") == StopMatch("a", "bc")
    assert StopChecker(("c", "bc", "abc")).push("xabc") == StopMatch("x", "abc")


def test_without_stop_strings_text_passes() -> None:
    assert StopChecker(()).push("text") == StopMatch("text")
