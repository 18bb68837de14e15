"""Panics of packages that are written in Rust."""


def is_rust_panic(error: BaseException) -> bool:
    """Return True for a panic, which PyO3 raises as a `BaseException` of a class that cannot be imported."""
    return type(error).__name__ == "PanicException"
