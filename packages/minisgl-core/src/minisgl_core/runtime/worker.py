"""Main function of one rank's process: rank 0 schedules, and every rank runs the plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
import psutil

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.contracts.grammar import Grammar
from minisgl_core.engine.build import BuiltEngine, build_engine
from minisgl_core.engine.engine import Engine
from minisgl_core.errors import InvalidValueError, QueueFullError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.batch_plan import BatchPlan, TokenMasks
from minisgl_core.protocol.engine_snapshot import SnapshotRequest
from minisgl_core.protocol.messages import Abort, Count, Ready, Rejected, Stop, Submit, TokenBatch, TokenOut
from minisgl_core.runtime.engine_loop import EngineLoop, Outputs
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender, send_all
from minisgl_core.scheduler.constraints import Grammars
from minisgl_core.scheduler.grammar_checker import GrammarChecker
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_core.scheduler.monitor import Monitor
from minisgl_core.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

Incoming = Submit | Abort | Count | SnapshotRequest | Stop
FromRank0 = BatchPlan | TokenMasks | Stop


def run_worker(
    config: EngineConfig,
    placements: Sequence[RankPlacement],
    rank: int,
    endpoints: IpcAddresses,
    report: Callable[[Ready], None],
) -> None:
    """Build this rank's engine, report that it is ready, and serve until stopped.

    Args:
        config: options of the user.
        placements: placements of all ranks.
        rank: this rank.
        endpoints: addresses of the launch.
        report: called once the engine is ready.
    """
    logger.info("started the process in %.1f s", time.time() - psutil.Process().create_time())
    registry = Registry.from_environment()
    hooks = Hooks(registry if rank == 0 else None)
    placement = placements[rank]
    if rank > 0:
        with Receiver[FromRank0](placement.address, FromRank0) as inbox:
            built = build_engine(config, registry, hooks, placement)
            report(Ready(process=f"scheduler rank {rank}"))
            follow(built, inbox)
        return
    with Receiver[Incoming](endpoints.scheduler_in, Incoming) as requests:
        built = build_engine(config, registry, hooks, placement)
        followers = [Sender(each.address) for each in placements[1:]]
        info = msgspec.structs.replace(built.info, engine=endpoints.engine, replica=endpoints.replica)
        loop = make_loop(built, registry, hooks, followers)
        if loop.scheduler.grammars is not None:
            loop.scheduler.grammars.warm_up()
        if hooks.engine_started is not None:
            hooks.engine_started(info=info)
        report(Ready(process="scheduler rank 0", engine=info))
        with in_use(built.engine):
            try:
                _serve(
                    loop,
                    requests,
                    [Sender(address) for address in endpoints.scheduler_out],
                    endpoints.engine,
                    endpoints.replica,
                )
            finally:
                if loop.scheduler.grammars is not None:
                    loop.scheduler.grammars.close()
                send_all(followers, Stop())
                if hooks.engine_stopped is not None:
                    hooks.engine_stopped()
                for sender in followers:
                    sender.close()


@contextmanager
def in_use(engine: Engine) -> Iterator[None]:
    """Close the engine at the end. After an error, abort the communicator instead of waiting for the other ranks."""
    try:
        yield
    except BaseException:
        for leave in (engine.free_graphs, engine.communicator.abort):
            with suppress(Exception):  # the original error is the one to report
                leave()
        raise
    engine.close()


def make_loop(built: BuiltEngine, registry: Registry, hooks: Hooks, followers: list[Sender]) -> EngineLoop:
    """Return rank 0's loop with a scheduler for an engine."""
    config = built.config
    limits = SchedulerLimits(
        max_running=config.scheduler.max_running_requests,
        max_prefill_tokens=int(config.scheduler.max_prefill_length),
        max_queued=config.scheduler.max_queued_requests,
        max_seq_len=built.max_seq_len,
        num_pages=built.num_pages,
        page_size=int(config.cache.page_size),
        eos_ids=frozenset(built.checkpoint.config.eos_token_ids),
        vocab_size=built.checkpoint.config.vocab_size,
    )
    cache = registry.load("prefix_cache", config.cache.cache)(limits.page_size)
    policy = registry.load("policy", config.scheduler.policy)()
    send_plan = (lambda plan: send_all(followers, plan)) if followers else None
    overlap = not config.scheduler.disable_overlap
    guard = GrammarChecker(built.config.backends.grammar)
    grammars = Grammars(lambda: load_grammar(built, registry), limits.vocab_size, guard)
    scheduler = Scheduler(limits, cache, policy, hooks, grammars)
    return EngineLoop(scheduler, built.engine, hooks, overlap=overlap, send_plan=send_plan)


def load_grammar(built: BuiltEngine, registry: Registry) -> Grammar:
    """Return the grammar provider for the engine's model.

    Raises:
        MinisglError: the provider is not installed, or cannot read the model's tokenizer.
    """
    checkpoint = built.checkpoint
    provider: type[Grammar] = registry.load("grammar", built.config.backends.grammar)
    return provider(checkpoint.source.tokenizer(), checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)


def follow(built: BuiltEngine, inbox: Receiver[FromRank0]) -> None:
    """Run the plans of rank 0 in order, until it stops.

    The result of a step is awaited before the second step after it is launched, so that a rank does not run ahead without
    limit.
    """
    pending = None
    with in_use(built.engine):
        while isinstance(plan := inbox.receive(), BatchPlan):
            begun = built.engine.begin(plan)
            masks = inbox.receive() if len(plan.sample.masked) else None
            if not isinstance(masks, TokenMasks | None):
                break
            launched = built.engine.finish(begun, masks)
            if pending is not None:
                pending.result()
            pending = launched


def _serve(
    loop: EngineLoop, requests: Receiver[Incoming], workers: list[Sender], engine: int = 0, replica: int = 0
) -> None:
    monitor = Monitor(loop.scheduler, replica)
    while True:
        # Take all messages that have arrived. Otherwise requests that end within one step would run one at a time.
        messages = requests.drain() if loop.has_work else [requests.receive(), *requests.drain()]
        for message in messages:
            if isinstance(message, Submit):
                _submit(loop.scheduler, message, workers)
            elif isinstance(message, Abort):
                loop.scheduler.abort(message.request_id, message.reason)
            elif isinstance(message, Count):
                message.counts.update(_counts(loop.scheduler))
                workers[message.worker].send(message)
            elif isinstance(message, SnapshotRequest):
                workers[message.worker].send(monitor.state(message))
            else:
                return
        _deliver(loop.step(), workers, engine)


def _submit(scheduler: Scheduler, submit: Submit, workers: list[Sender]) -> None:
    """Submit a request, or answer that it is refused. No client's request may stop the scheduler."""
    details = {"request_id": submit.request_id}
    logger.debug("%d requests run and %d wait", scheduler.num_running, scheduler.num_waiting, extra=details)
    try:
        scheduler.submit(submit)
    except InvalidValueError as error:
        reply = Rejected(request_id=submit.request_id, kind="invalid", message=str(error), param=error.name)
        workers[submit.worker].send(reply)
    except QueueFullError as error:
        workers[submit.worker].send(Rejected(request_id=submit.request_id, kind="queue_full", message=str(error)))


def _counts(scheduler: Scheduler) -> dict[str, int]:
    return {
        "waiting": scheduler.num_waiting,
        "running": scheduler.num_running,
        "locked pages": scheduler.pages.cache.num_locked,
    }


def _deliver(outputs: Outputs, workers: list[Sender], engine: int) -> None:
    batches: dict[int, list[TokenOut]] = {}
    for worker, output in outputs:
        if output.rejected is not None:
            workers[worker].send(output.rejected)
        else:
            batches.setdefault(worker, []).append(output)
    for worker, batch in batches.items():
        workers[worker].send(TokenBatch(batch, engine))
