"""Runs ``minisgl bench scheduler``: the real scheduler and prefix cache, and random tokens instead of an engine."""

from collections import deque
from time import thread_time
from types import SimpleNamespace

import click
import numpy as np

from minisgl_core.cli.table import print_table
from minisgl_core.kv.allocator import Int32Array
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.batch_plan import BatchPlan, StepResult
from minisgl_core.protocol.messages import Submit, encode
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_core.scheduler.policies import FirstComeFirstServed
from minisgl_core.scheduler.scheduler import Scheduler
from minisgl_core.utils.progress import progress_bar
from minisgl_server.bench.environment import hardware, versions, write_json

_VOCAB_SIZE = 150_000
_EOS_ID = 2
_FIRST_ID = 3
"""Lower bound of the random token ids. The EOS token is below it, so that no request ends."""
_WARM_UP_STEPS = 8
_PREFIX_PAGES = 16
"""Pages per cached prefix."""
_NUM_ADMITTED = 64
"""Prompts that are admitted together to measure the cost per prompt."""
_NUM_ADMISSIONS = 3
"""Repeats of this measurement."""


CpuTimes = tuple[float, float, float]
"""CPU times of one step in seconds: to schedule it, to process its results, and to encode them."""


def run_scheduler(options: SimpleNamespace) -> None:
    """Measure each batch size, print a table, and write the JSON file if one is given. `options` are the command's flags."""
    with progress_bar() as bar:
        results = [_measure(options, num) for num in bar.track(options.batch_sizes, description="batch sizes")]
    click.echo(f"machine  {hardware()['cpu']}, Python {versions()['python']}")
    rows = [[f"{value:,.3f}".removesuffix(".000") for value in each.values()] for each in results]
    print_table(list(results[0]), rows)
    write_json(options.json_file, options=vars(options), results=results)


def _measure(options: SimpleNamespace, num_requests: int) -> dict[str, float]:
    loop = _Loop(options, num_requests)
    loop.admit(num_requests)
    steps = np.array([loop.step() for _ in range(_WARM_UP_STEPS + options.num_steps)])[_WARM_UP_STEPS:]
    schedule_s, process_s, encode_s = np.median(steps, axis=0).tolist()
    both = steps[:, :2].sum(axis=1)
    step = np.median(both)
    admissions = [np.sum(np.array(loop.admit(_NUM_ADMITTED))[:, :2].sum(axis=1) - step) for _ in range(_NUM_ADMISSIONS)]
    return {
        "requests": num_requests,
        "schedule ms": 1e3 * schedule_s,
        "process ms": 1e3 * process_s,
        "both ms": 1e3 * float(step),
        "99% ms": 1e3 * float(np.quantile(both, 0.99)),
        "us per request": 1e6 * float(step) / num_requests,
        "encode ms": 1e3 * encode_s,
        "admission us": 1e6 * float(np.median(admissions)) / _NUM_ADMITTED,
    }


class _Loop:
    """Loop over a scheduler like `EngineLoop`, whose steps take no time."""

    def __init__(self, options: SimpleNamespace, num_requests: int) -> None:
        """Fill the cache."""
        self._options, self._rng = options, np.random.default_rng(0)
        self._max_in_flight = 0 if options.disable_overlap else 1
        self._in_flight: deque[BatchPlan] = deque()
        self._num_submitted = 0
        num_rows = num_requests + _NUM_ADMITTED * _NUM_ADMISSIONS
        self._max_tokens = options.num_steps + _WARM_UP_STEPS + num_rows
        self._max_prefill = _NUM_ADMITTED * options.input_len
        pages_per_request = -(-(options.input_len + self._max_tokens) // options.page_size)
        prompt_pages = num_rows * (options.input_len // options.page_size + 1)
        limits = SchedulerLimits(
            max_running=num_rows,
            max_prefill_tokens=self._max_prefill,
            max_queued=num_rows,
            max_seq_len=options.input_len + self._max_tokens,
            # The pages of the prompts are free at first, so that each later page evicts one from the cache.
            num_pages=1 + max(options.cached_pages + prompt_pages, num_rows * pages_per_request),
            page_size=options.page_size,
            eos_ids=frozenset((_EOS_ID,)),
            vocab_size=_VOCAB_SIZE,
        )
        cache = Registry.from_environment().load("prefix_cache", options.cache)(options.page_size)
        self._scheduler = Scheduler(limits, cache, FirstComeFirstServed())
        self._prefixes = self._fill_cache()

    def admit(self, count: int) -> list[CpuTimes]:
        """Submit prompts, half of whose tokens are cached, and run the steps until all of them decode."""
        options = self._options
        sampling = SamplingParams(temperature=0.6, max_tokens=self._max_tokens)
        for number in range(self._num_submitted, self._num_submitted + count):
            # Different lengths, so that not all requests need a page in the same step.
            token_ids = self._tokens(options.input_len - int(self._rng.integers(min(16, options.input_len // 2))))
            cached = self._prefixes[number % len(self._prefixes)][: options.input_len // 2]
            token_ids[: len(cached)] = cached[: len(token_ids)]
            self._scheduler.submit(Submit(request_id=f"request-{number:028}", token_ids=token_ids, sampling=sampling))
        self._num_submitted += count
        times = []
        while self._scheduler.num_waiting or any(plan.num_requests > plan.num_decodes for plan in self._in_flight):
            times.append(self.step())
        return times

    def step(self) -> CpuTimes:
        start = thread_time()
        plan = self._scheduler.schedule()
        scheduled = thread_time()
        assert plan is not None
        self._in_flight.append(plan)
        if len(self._in_flight) <= self._max_in_flight:
            return scheduled - start, 0.0, 0.0
        plan = self._in_flight.popleft()
        result = StepResult(self._tokens(len(plan.sample.index)).astype(np.int64), [], [])
        begin = thread_time()
        outputs = self._scheduler.process(plan, result)
        processed = thread_time()
        for _, batch in outputs:
            encode(batch)
        return scheduled - start, processed - begin, thread_time() - processed

    def _fill_cache(self) -> list[Int32Array]:
        """Insert random prefixes; return them."""
        pages, prefixes, page_size = self._scheduler.pages, [], self._options.page_size
        for start in range(0, self._options.cached_pages, _PREFIX_PAGES):
            count = min(_PREFIX_PAGES, self._options.cached_pages - start)
            prefixes.append(self._tokens(count * page_size))
            pages.cache.insert(prefixes[-1], pages.allocator.allocate(count))
        return prefixes or [self._tokens(1)]

    def _tokens(self, count: int) -> Int32Array:
        return self._rng.integers(_FIRST_ID, _VOCAB_SIZE, count, dtype=np.int32)
