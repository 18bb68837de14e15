"""Texts of exceptions in messages, and panics of packages that are written in Rust."""


def one_line(error: BaseException, max_chars: int | None = None) -> str:
    """Return the message of an exception on one line; the name of its class if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if max_chars is None else shortened(text, max_chars)


def one_line_with_type(error: BaseException) -> str:
    """Return the class and the message of an exception on one line, such as ``KeyError: 'a'``."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def shortened(text: str, max_chars: int) -> str:
    """Return a text of at most `max_chars` characters, which ends in ``...`` if it was longer."""
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def is_rust_panic(error: BaseException) -> bool:
    """Return True for a panic, which PyO3 raises as a `BaseException` of a class that cannot be imported."""
    return type(error).__name__ == "PanicException"
