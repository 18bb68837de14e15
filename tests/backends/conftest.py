from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def patch_triton_language_once_per_launch() -> Iterator[None]:
    """Triton's interpreter wraps all of triton.language at every call of a device function, for 40% of a test's time.

    Once per launch and module is enough: the end of the launch restores what the launch wrapped.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    launch, patch_lang = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()

    def launch_and_patch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def patch_once(fn: Any) -> Any:
        """Patch what the module of `fn` imports. Only a launch, which is the first to call this, uses the result."""
        module = id(fn.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch_lang(fn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_and_patch)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
