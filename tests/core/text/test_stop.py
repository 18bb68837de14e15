from __future__ import annotations

import timeit

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.sampling_params import MAX_STOPS
from minisgl_core.text.stop import StopFinder


def naive(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=7), max_size=3).map(tuple),
)
@settings(max_examples=1000)
def test_finds_what_a_search_from_the_start_finds(pieces: list[str], stops: tuple[str, ...]) -> None:
    finder, shown = StopFinder(stops), ""
    including, shown_including = StopFinder(stops, include_found=True), ""
    for place in range(len(pieces)):
        text, stop = finder.push(pieces[place])
        shown += text
        text, same_stop = including.push(pieces[place])
        shown_including += text
        assert same_stop == stop
        so_far = "".join(pieces[: place + 1])
        assert stop == naive(so_far, stops)[1]
        if stop is not None:
            assert shown == naive(so_far, stops)[0]
            assert shown_including == shown + stop
            return
        held = so_far[len(shown) :]
        assert all(not stop.startswith(held + "x") for stop in stops)
        assert not held or any(stop.startswith(held) for stop in stops), (
            "no more is held back than could be a stop string"
        )
    assert shown + finder.finish() == "".join(pieces)


def test_a_long_stop_text_costs_no_more_than_a_short_one() -> None:
    """Quadratic work on a million characters would not end."""
    stop = "a" * 1_000_000
    finder = StopFinder((stop + "b",))
    assert finder.push(stop) == ("", None)
    assert finder.push("a" * 10) == ("a" * 10, None)


def test_stop_texts_that_do_not_begin_cost_little() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 50

    def seconds(stop: tuple[str, ...]) -> float:
        return min(timeit.repeat(lambda: StopFinder(stop).push(text), number=1, repeat=5))

    few, many = ("<end>", "###"), tuple(f"{i:03}" for i in range(MAX_STOPS))
    assert seconds(many) < 10 * seconds(few)


def test_stop_texts_that_all_have_begun_cost_little() -> None:
    """One request could otherwise keep a tokenizer worker busy, as all of its outputs may be such a text."""
    text = " " * 2000

    def seconds(count: int) -> float:
        stop = tuple(f"{' ' * 120}{index:03}" for index in range(count))
        return min(timeit.repeat(lambda: StopFinder(stop).push(text), number=1, repeat=5))

    assert seconds(MAX_STOPS) < 10 * seconds(2)
