"""Messages of the executor ray, without Ray."""

from __future__ import annotations

import pytest

from minisgl_backends.executor.ray_executor import summarize

LACKS_PACKAGES = """\x1b[36mray::RankActor.reserve()\x1b[39m (pid=71, ip=10.0.0.2, actor_id=a, repr=<TemporaryActor>)
RuntimeError: The actor with name RankActor failed to import on the worker:

\x1b[36mray::RankActor.reserve()\x1b[39m (pid=71, ip=10.0.0.2, actor_id=a, repr=<TemporaryActor>)
    from minisgl_backends.executor.rank_actor import RankActor
ModuleNotFoundError: No module named 'minisgl_backends'"""


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (LACKS_PACKAGES, "ModuleNotFoundError: No module named 'minisgl_backends' (on 10.0.0.2)"),
        (f"The actor died because of its creation task, {LACKS_PACKAGES}", "(on 10.0.0.2)"),
        ("The actor died unexpectedly.\n\tclass_name: RankActor\nIts node died.", "The actor died unexpectedly."),
        ("", "RuntimeError"),
    ],
)
def test_an_error_of_ray_is_summarized_in_one_line(text: str, summary: str) -> None:
    assert summary in summarize(RuntimeError(text))
    assert "\x1b" not in summarize(RuntimeError(text))
