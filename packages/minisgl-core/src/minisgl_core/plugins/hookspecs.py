"""Hook specifications. A plugin registers a hook module in the group ``minisgl.hooks``::

    # minisgl_example/hooks.py, registered as: example = "minisgl_example.hooks"
    from minisgl_core import hookimpl

    @hookimpl
    def request_finished(record):
        print(record.request_id, record.num_output_tokens)

An implementation declares the arguments that it needs, by name. Hooks of the engine loop run inside the loop: they must return
quickly and must not use the device.

The entry point may name a function or a class instead of a module. It is called without arguments, once in each process that
calls hooks: the launcher, each rank, the API server, and the process that compiles attention kernels. The result is registered,
so that hooks can have state, which these processes do not share. A result of None registers nothing and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    import click
    from fastapi import FastAPI

    from minisgl_core.contracts.platform import Hardware
    from minisgl_core.contracts.prefix_cache import CacheNamespace, PageIds, TokenIds
    from minisgl_core.protocol.batch_plan import BatchPlan, StepResult
    from minisgl_core.protocol.messages import EngineInfo
    from minisgl_core.protocol.scheduler_stats import SchedulerStats

PROJECT = "minisgl"
"""Project name for pluggy."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator that marks a function of a hook module as an implementation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Record of one finished request; times by ``time.monotonic()``.

    Attributes:
        request_id: the scheduler's id; a request with several outputs has one id per output.
        finish_reason: ``stop``, ``length`` or ``abort``.
        num_prompt_tokens: tokens of the prompt.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_output_tokens: generated tokens.
        num_preemptions: number of times that it was preempted.
        arrival_s: time when the scheduler received it.
        scheduled_s: time of its first admission to a batch; None if it ended before.
        first_token_s: time when its first token was known; None if it ended before.
        finish_s: time when it ended.
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
    """Current state of an engine. Read it only within a hook."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step or for resumption."""

    @property
    def num_running(self) -> int:
        """Requests that have been admitted to the batch."""

    @property
    def num_pages_used(self) -> int:
        """KV pages that requests use. Evictable pages of the prefix cache do not count."""

    @property
    def stats(self) -> SchedulerStats:
        """Totals since the start. After an `LLM` recovers from a failed step, a new object counts from 0."""


@hookspec
def engine_started(info: EngineInfo) -> None:
    """Called once per engine, on rank 0, when it is ready for its first step."""


@hookspec
def engine_stopped() -> None:
    """Called when an engine ends.

    After a failed start, `engine_started` may not have been called. After a failed start or step, the device may not be released
    yet.
    """


@hookspec
def batch_scheduled(plan: BatchPlan, num_waiting: int, num_running: int) -> None:
    """Called on rank 0 when a step was planned, before the engine runs it.

    Args:
        plan: plan of the step; must not be changed.
        num_waiting: requests that wait for their first step or for resumption.
        num_running: requests that hold pages, including those of this step.
    """


@hookspec
def batch_finished(plan: BatchPlan, result: StepResult, state: EngineState) -> None:
    """Called on rank 0 when the host has a step's tokens. With overlap, the next step is scheduled already."""


@hookspec
def request_finished(record: RequestRecord, state: EngineState) -> None:
    """Called on rank 0 after a request ended, for any reason, and released its pages."""


@hookspec
def pages_cached(namespace: CacheNamespace, token_ids: TokenIds, pages: PageIds, num_present: int) -> None:
    """Called on rank 0 when pages were inserted into the prefix cache.

    Together with `pages_evicted`, it reports all changes of the cache, for example to a router that tracks its content.

    Args:
        namespace: namespace of the prefix.
        token_ids: the whole prefix that is cached now, int32 [len(pages) * page_size]; a copy.
        pages: pages of the prefix, int32; must not be changed.
        num_present: number of these pages, from the first, that were cached before.
    """


@hookspec
def pages_evicted(pages: PageIds) -> None:
    """Called on rank 0 when pages, int32, were evicted from the prefix cache. The array must not be changed."""


@hookspec
def cli_options(command: str) -> Sequence[click.Option]:  # type: ignore[empty-body]
    """Return further options for a command.

    ``--config`` files may set them like the command's own options. Their values are not passed to the command, so an option acts
    in its click callback. To reach hooks in other processes, the callback can set an environment variable, which they inherit.

    Args:
        command: the command's name, such as ``launch``.
    """


@hookspec
def api_routes(app: FastAPI) -> None:
    """Add routes to the API server.

    ``--web-ui`` enables the routes of the hook module ``web_ui``. ``--plugin-routes`` enables those of all other hook modules.
    Their other hooks need neither flag.

    ``app.state`` has the engine's ``client``, the server's ``options``, and ``public_paths``, which need no API key.
    """


@hookspec(firstresult=True)
def preferred_provider(kind: str, hardware: Hardware) -> str | None:
    """Return the provider that ``auto`` should select for this hardware, or None for no preference.

    The first implementation that returns a name decides. A provider that does not apply here is never selected.

    Args:
        kind: the plugin kind, such as ``attention``.
        hardware: the devices that the engine will use.
    """
