from __future__ import annotations

import timeit

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_core.sampling_params import MAX_STOPS
from minisgl_core.text.stop import StopFinder


def naive_search(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    chunks=st.lists(st.text("ab", max_size=5), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=7), max_size=3).map(tuple),
)
@settings(max_examples=1000)
def test_matches_equal_a_naive_search(chunks: list[str], stops: tuple[str, ...]) -> None:
    finder, shown = StopFinder(stops), ""
    including, shown_including = StopFinder(stops, include_found=True), ""
    for place in range(len(chunks)):
        text, stop = finder.push(chunks[place])
        shown += text
        text, same_stop = including.push(chunks[place])
        shown_including += text
        assert same_stop == stop
        so_far = "".join(chunks[: place + 1])
        assert stop == naive_search(so_far, stops)[1]
        if stop is not None:
            assert shown == naive_search(so_far, stops)[0]
            assert shown_including == shown + stop
            return
        held = so_far[len(shown) :]
        assert all(not stop.startswith(held + "x") for stop in stops)
        assert not held or any(stop.startswith(held) for stop in stops), (
            "no more is held back than could be a stop string"
        )
    assert shown + finder.finish() == "".join(chunks)


def test_long_stop_strings_take_linear_time() -> None:
    """Quadratic work on a million characters would not finish."""
    stop = "a" * 1_000_000
    finder = StopFinder((stop + "b",))
    assert finder.push(stop) == ("", None)
    assert finder.push("a" * 10) == ("a" * 10, None)


def test_stop_strings_that_never_match_take_little_time() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 50

    def seconds(stop: tuple[str, ...]) -> float:
        return min(timeit.repeat(lambda: StopFinder(stop).push(text), number=1, repeat=5))

    few, many = ("<end>", "###"), tuple(f"{i:03}" for i in range(MAX_STOPS))
    assert seconds(many) < 10 * seconds(few)


def test_many_partially_matched_stop_strings_take_little_time() -> None:
    """Otherwise one request could keep a tokenizer worker busy."""
    text = " " * 2000

    def seconds(count: int) -> float:
        stop = tuple(f"{' ' * 120}{index:03}" for index in range(count))
        return min(timeit.repeat(lambda: StopFinder(stop).push(text), number=1, repeat=5))

    assert seconds(MAX_STOPS) < 10 * seconds(2)
