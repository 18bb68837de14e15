"""What a hook module may implement. A plugin registers one in the group ``minisgl.hooks``::

    # minisgl_example/hooks.py, registered as: example = "minisgl_example.hooks"
    from minisgl_core import hookimpl

    @hookimpl
    def request_finished(record):
        print(record.request_id, record.num_output_tokens)

An implementation takes the arguments that it needs, by name. Hooks of the engine's loop run inside it: they must return
quickly and must not touch the device.

The entry point may name a function or a class instead of a module. It is called without arguments once for each engine, and what
it returns is registered, so that hooks can have state; None registers nothing, and costs nothing from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    import click
    from fastapi import FastAPI

    from minisgl_core.batch import BatchPlan, StepResult
    from minisgl_core.contracts.platform import Hardware
    from minisgl_core.contracts.prefix_cache import CacheNamespace, PageIds, TokenIds
    from minisgl_core.messages import EngineInfo
    from minisgl_core.scheduler.stats import SchedulerStats

PROJECT = "minisgl"
"""Pluggy's name for the project."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a hook module as an implementation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What became of one request; times are of ``time.monotonic()``.

    Attributes:
        request_id: the scheduler's id; one of n for a request with several outputs.
        finish_reason: ``stop``, ``length`` or ``abort``.
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: those of them that the prefix cache held.
        num_output_tokens: tokens generated.
        num_preemptions: how often it lost its pages and was resumed.
        arrival_s: when the scheduler received it.
        scheduled_s: when it was first given a place in a batch; None if it ended before.
        first_token_s: when its first token was known; None if it ended before.
        finish_s: when it ended.
    """

    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finish_s: float


class EngineState(Protocol):
    """What an engine holds at the moment; to be read within a hook only."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step or to be resumed."""

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""

    @property
    def num_pages_used(self) -> int:
        """Pages of KV that requests hold; the prefix cache's others, which can be evicted, do not count."""

    @property
    def stats(self) -> SchedulerStats:
        """Totals since the start; they begin anew, in another object, where an `LLM` recovers from a step that failed."""


@hookspec
def engine_started(info: EngineInfo) -> None:
    """The engine of this process is ready for its first step. Called once an engine, on rank 0."""


@hookspec
def engine_stopped() -> None:
    """The engine of this process ends and has released the device. Called once for each `engine_started`."""


@hookspec
def batch_scheduled(plan: BatchPlan, num_waiting: int, num_running: int) -> None:
    """A step was planned and goes to the engine next. Called on rank 0.

    Args:
        plan: the step; must not be changed.
        num_waiting: requests that wait for their first step or to be resumed.
        num_running: requests that hold pages, this step's included.
    """


@hookspec
def batch_finished(plan: BatchPlan, result: StepResult, state: EngineState) -> None:
    """The host has a step's tokens. Under overlap, the next step has been scheduled by then. Called on rank 0."""


@hookspec
def request_finished(record: RequestRecord, state: EngineState) -> None:
    """A request ended, whatever the reason, and holds nothing any more. Called on rank 0."""


@hookspec
def pages_cached(namespace: CacheNamespace, token_ids: TokenIds, pages: PageIds, num_present: int) -> None:
    """The prefix cache has taken pages. Called on rank 0.

    With `pages_evicted` it tells all that enters and leaves the cache, such as for a router that follows what replicas hold.

    Args:
        namespace: of the prefix.
        token_ids: the whole prefix that is cached now, int32 [len(pages) * page_size]; a copy.
        pages: its pages, int32; must not be changed.
        num_present: how many of them, from the first, were cached before.
    """


@hookspec
def pages_evicted(pages: PageIds) -> None:
    """The prefix cache has given up pages, int32, which hold other KV from now on; must not be changed. Called on rank 0."""


@hookspec
def cli_options(command: str) -> Sequence[click.Option]:  # type: ignore[empty-body]
    """Further options for a command.

    They take part in ``--config`` files like the command's own. Their values are not passed to the command: an option acts by
    its click callback. Hooks of the loop may run in other processes, which inherit the environment.

    Args:
        command: the command's name, such as ``launch``.
    """


@hookspec
def api_routes(app: FastAPI) -> None:
    """Add routes to the API server. ``--page`` enables the hook module ``page``, ``--plugin-routes`` enables all others.

    ``app.state`` has the engine's ``client``, the server's ``options``, and ``public_paths``, which need no API key.
    """


@hookspec(firstresult=True)
def preferred_provider(kind: str, hardware: Hardware) -> str | None:
    """The provider that ``auto`` should take for this hardware, or None to leave it to others.

    The first implementation with an answer wins. A provider that does not apply is not taken, whoever prefers it.

    Args:
        kind: the seam, such as ``attention``.
        hardware: the devices that the engine will use.
    """
