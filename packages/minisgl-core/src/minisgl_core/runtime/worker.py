"""Main function of one rank's process: rank 0 schedules, and every rank runs the plans."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import msgspec

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.contracts.grammar import GrammarBackend
from minisgl_core.engine.build import BuiltModelRunner, build_model_runner
from minisgl_core.engine.model_runner import ModelRunner
from minisgl_core.engine.startup_timer import StartupTimer, process_age_s
from minisgl_core.engine.step import PendingStep
from minisgl_core.errors import InvalidValueError, QueueFullError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.batch_plan import BatchPlan, StepResult, TokenMasks
from minisgl_core.protocol.engine_snapshot import SnapshotRequest
from minisgl_core.protocol.messages import Abort, Ready, Rejected, RequestCounts, Stop, Submit
from minisgl_core.runtime.engine_loop import EngineLoop, Outputs
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender, send_all
from minisgl_core.scheduler.constraints import GrammarManager
from minisgl_core.scheduler.grammar_checker import GrammarChecker
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_core.scheduler.monitor import Monitor
from minisgl_core.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

Incoming = Submit | Abort | RequestCounts | SnapshotRequest | Stop
"""Messages to the scheduler. Only tests send `Stop`; the launcher ends rank 0 with a signal."""
FromRank0 = BatchPlan | TokenMasks | Stop
"""Plans in the order of the steps, each followed by its token masks if it has any."""
FromLastStage = StepResult | Stop
"""Results in the order of the steps; `Stop` if there will be no more."""

_SWITCH_INTERVAL_S = 1e-4
"""Longest time for which another thread keeps the GIL while the engine loop waits for it; Python's default is 5 ms.

Launching a step with prompts takes over 80 calls of CUDA, and each releases the GIL. While a thread loads the grammar backend or
compiles a grammar, the loop may wait that long after each call.
"""
_IDLE_S = 10.0
"""Time without a request after which the grammar backend is loaded, if no grammar has needed it before.

Loading it delays steps for seconds, so it must not begin while the first clients of a new server connect.
"""


def run_worker(
    config: EngineConfig,
    placements: Sequence[RankPlacement],
    rank: int,
    addresses: IpcAddresses,
    report: Callable[[Ready], None],
) -> None:
    """Build this rank's model runner, `report` that it is ready, and serve until stopped."""
    timer = StartupTimer(process_age_s())
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    registry = Registry.from_environment()
    hooks = Hooks(registry)  # on all ranks, since `preferred_provider` must select the same providers on each
    timer.done("started the process")
    if rank == 0:
        _run_rank0(config, registry, hooks, placements, addresses, report)
        return
    placement = placements[rank]
    with Receiver[FromRank0](placement.address, FromRank0) as from_rank0:
        built = build_model_runner(config, registry, hooks, placement)
        report(Ready(process=f"engine rank {rank}"))
        if config.parallel.pp == 1:
            run_plans(built, from_rank0)
        else:
            run_stage_plans(built, from_rank0, placement.address, placements[0].address)


def _run_rank0(
    config: EngineConfig,
    registry: Registry,
    hooks: Hooks,
    placements: Sequence[RankPlacement],
    addresses: IpcAddresses,
    report: Callable[[Ready], None],
) -> None:
    """Build the model runner of rank 0 and the scheduler, and serve requests; see `run_worker`."""
    placement = placements[0]
    with ExitStack() as stack:
        requests = stack.enter_context(Receiver[Incoming](addresses.scheduler_in, Incoming))
        results = None
        if config.parallel.pp > 1:
            results = stack.enter_context(Receiver[FromLastStage](placement.address, FromLastStage))
        built = build_model_runner(config, registry, hooks, placement)
        timer = StartupTimer()
        plan_senders = [Sender(each.address) for each in placements[1:]]
        info = msgspec.structs.replace(built.info, engine_id=addresses.engine_id, replica=addresses.replica)
        tokenizers = [Sender(address) for address in addresses.scheduler_out]
        deliver = partial(_deliver, tokenizers=tokenizers, engine_id=addresses.engine_id)
        loop = make_loop(built, registry, hooks, plan_senders, results, deliver)
        if hooks.engine_started is not None:
            hooks.engine_started(info=info)
        if hooks.engine_stopped is not None:
            stack.callback(hooks.engine_stopped)
        timer.done("made the scheduler")
        report(Ready(process="engine rank 0", engine_info=info))
        with closing(built.model_runner):
            try:
                _serve(loop, requests, tokenizers, addresses.engine_id, addresses.replica)
            finally:
                loop.scheduler.grammars.close()
                send_all(plan_senders, Stop())
                for sender in plan_senders:
                    sender.close()


@contextmanager
def closing(model_runner: ModelRunner) -> Iterator[None]:
    """Close the model runner at the end. After an error, abort its communicators instead of waiting for the other ranks."""
    try:
        yield
    except BaseException:
        for clean_up in (model_runner.free_graphs, model_runner.groups.abort):
            with suppress(Exception):  # the original error is the one to report
                clean_up()
        raise
    model_runner.close()


def make_loop(
    built: BuiltModelRunner,
    registry: Registry,
    hooks: Hooks,
    plan_senders: list[Sender],
    results: Receiver[FromLastStage] | None = None,
    deliver: Callable[[Outputs], None] | None = None,
) -> EngineLoop:
    """Return rank 0's loop, with a new scheduler.

    `plan_senders` reach the other ranks. `results` come from the last pipeline stage, if there are several. For `deliver`, see
    `EngineLoop`.
    """
    config = built.config
    overlap, num_stages = not config.scheduler.disable_overlap, config.parallel.pp
    limits = SchedulerLimits(
        max_running=config.scheduler.max_running_requests,
        max_prefill_tokens=int(config.scheduler.max_prefill_length),
        max_queued=config.scheduler.max_queued_requests,
        max_seq_len=built.info.max_seq_len,
        num_pages=built.info.num_pages,
        page_size=int(config.cache.page_size),
        eos_ids=frozenset(built.checkpoint.config.eos_token_ids),
        vocab_size=built.checkpoint.config.vocab_size,
        num_micro_batches=1 if num_stages == 1 else num_stages + overlap,
        max_step_s=float(config.scheduler.max_step_ms) / 1000,
    )
    cache = registry.load("prefix_cache", config.cache.cache)(limits.page_size)
    policy = registry.load("policy", config.scheduler.policy)()
    checker = GrammarChecker(config.backends.grammar)
    grammars = GrammarManager(lambda: load_grammar_backend(built, registry), limits.vocab_size, checker)
    return EngineLoop(
        Scheduler(limits, cache, policy, hooks, grammars),
        built.model_runner,
        hooks,
        overlap=overlap,
        num_stages=num_stages,
        send_plan=partial(send_all, plan_senders) if plan_senders else None,
        receive_result=None if results is None else partial(_next_result, results),
        deliver=deliver,
    )


def _next_result(results: Receiver[FromLastStage]) -> StepResult:
    result = results.receive()
    if not isinstance(result, StepResult):
        raise RuntimeError("the last pipeline stage sends no more results, because a rank has ended")
    return result


def load_grammar_backend(built: BuiltModelRunner, registry: Registry) -> GrammarBackend:
    """Return the grammar backend for the engine's model."""
    checkpoint = built.checkpoint
    provider: type[GrammarBackend] = registry.load("grammar", built.config.backends.grammar)
    return provider(checkpoint.source.tokenizer(), checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)


def run_plans(built: BuiltModelRunner, from_rank0: Receiver[FromRank0]) -> None:
    """Run the plans of rank 0 in order, until it stops.

    Step n + 2 is launched after step n is done, so that a rank is at most two steps ahead.
    """
    pending = None
    with closing(built.model_runner):
        while (launched := _launch_next(built.model_runner, from_rank0)) is not None:
            if pending is not None:
                pending.result()
            pending = launched


def run_stage_plans(
    built: BuiltModelRunner, from_rank0: Receiver[FromRank0], own_address: str, rank0_address: str
) -> None:
    """Run the plans of rank 0 on a rank of a pipeline, until rank 0 stops.

    A thread waits for each result, so that the next step is launched meanwhile. The first rank of the last stage sends the
    results to rank 0. If a step fails, the thread wakes this function by a `Stop` at the rank's own address.
    """
    groups = built.model_runner.groups
    sends_results = groups.is_last_stage and groups.tensor.rank == 0
    with Sender(rank0_address) as results, Sender(own_address) as wake, ThreadPoolExecutor(1) as waiter:

        def wait(pending: PendingStep) -> None:
            try:
                result = pending.result()
                if sends_results:
                    results.send(result)
            except BaseException:
                wake.send(Stop())
                raise

        waiting: Future[None] | None = None
        with closing(built.model_runner):
            while (launched := _launch_next(built.model_runner, from_rank0)) is not None:
                before, waiting = waiting, waiter.submit(wait, launched)
                if before is not None:
                    before.result()
            if waiting is not None:
                waiting.result()


def _launch_next(model_runner: ModelRunner, from_rank0: Receiver[FromRank0]) -> PendingStep | None:
    plan = from_rank0.receive()
    if not isinstance(plan, BatchPlan):
        return None
    forward_output = model_runner.execute_model(plan)
    masks = from_rank0.receive() if len(plan.sample.masked) else None
    return model_runner.sample_tokens(forward_output, masks) if isinstance(masks, TokenMasks | None) else None


def _serve(
    loop: EngineLoop, requests: Receiver[Incoming], tokenizers: list[Sender], engine_id: int, replica: int
) -> None:
    """Handle messages and run steps until the process ends, or a `Stop` arrives.

    `tokenizers` has the senders to the tokenizer workers and the router, by `Submit.worker`.
    """
    scheduler = loop.scheduler
    monitor = Monitor(scheduler, replica)
    while True:
        for message in _arrivals(requests, loop):
            if isinstance(message, Submit):
                _submit(scheduler, message, tokenizers, engine_id)
            elif isinstance(message, Abort):
                scheduler.abort(message.request_id, message.reason)
            elif isinstance(message, RequestCounts):
                message.counts |= {"waiting": scheduler.num_waiting, "running": scheduler.num_running}
                message.counts["locked pages"] = scheduler.pages.cache.num_locked
                tokenizers[message.worker].send(message)
            elif isinstance(message, SnapshotRequest):
                tokenizers[message.worker].send(monitor.snapshot(message))
            elif isinstance(message, Stop):
                return
        _deliver(loop.step(), tokenizers, engine_id)


def _arrivals(requests: Receiver[Incoming], loop: EngineLoop) -> Iterator[Incoming | None]:
    """Yield the messages to handle before the next step.

    Without work, this first waits for a message, and loads the grammar backend after `_IDLE_S`. Then it waits until
    `EngineLoop.time_to_schedule` is 0, and yields all messages that have arrived by then. With one message per step, short
    requests would end before the next one is submitted, and never share a batch.
    """
    if not loop.has_work:
        message = requests.receive(_IDLE_S)
        if message is None:
            loop.scheduler.grammars.warm_up()
            message = requests.receive()
        yield message
    while (wait_s := loop.time_to_schedule()) > 0:
        if wait_s < 1e-3:  # a socket waits for whole milliseconds
            time.sleep(wait_s)
        elif (message := requests.receive(wait_s)) is not None:
            yield message
    yield from requests.drain()


def _submit(scheduler: Scheduler, submit: Submit, tokenizers: list[Sender], engine_id: int) -> None:
    """Submit a request, or send its worker the reason why it is refused. An invalid request must not end the scheduler."""
    details = {"request_id": submit.request_id}
    logger.debug("%d requests run and %d wait", scheduler.num_running, scheduler.num_waiting, extra=details)
    try:
        scheduler.submit(submit)
    except InvalidValueError as error:
        reply = Rejected(request_id=submit.request_id, kind="invalid", message=str(error), param=error.name)
    except QueueFullError as error:
        reply = Rejected(request_id=submit.request_id, kind="queue_full", message=str(error))
    else:
        return
    reply.engine_id = engine_id
    tokenizers[submit.worker].send(reply)


def _deliver(outputs: Outputs, tokenizers: list[Sender], engine_id: int) -> None:
    """Send outputs to the tokenizer workers. If an output has `rejected`, only that message is sent."""
    for worker, batch in outputs:
        batch.engine_id = engine_id
        kept = []
        for output in batch.outputs:
            if output.rejected is None:
                kept.append(output)
            else:
                output.rejected.engine_id = engine_id
                tokenizers[worker].send(output.rejected)
        batch.outputs = kept
        if kept or batch.request_ids:
            tokenizers[worker].send(batch)
