"""Factory of the model runner, first with a minimal KV pool to measure a step's memory, then with the full pool."""

from contextlib import suppress
from dataclasses import replace

from minisgl_core.config.options import AUTO, EngineConfig
from minisgl_core.config.resolve import attention_spec
from minisgl_core.contracts.attention import AttentionBackend, check_layers
from minisgl_core.contracts.kv_cache import KVGroup, KVLayout, KVPoolSpec
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.platform import Platform
from minisgl_core.engine.combined_attention import CombinedAttention
from minisgl_core.engine.decode_graphs import graph_sizes
from minisgl_core.engine.model_runner import ModelRunner
from minisgl_core.engine.piecewise_graphs import piecewise_sizes
from minisgl_core.engine.profile_batch import profile_batch
from minisgl_core.engine.rank_groups import RankGroups
from minisgl_core.errors import InvalidValueError, ModelFormatError, PluginError
from minisgl_core.kv.page_table import PageTable
from minisgl_core.kv.pool import KVPool
from minisgl_core.plugins.registry import Registry

_LAUNCHES_S, _FLOPS = 0.5e-3, 600e12
"""Time to launch one layer's kernels separately, and FLOP/s of the device, both measured on an H200."""
_MIN_PIECEWISE_TOKENS = 2048
"""``auto`` captures piecewise CUDA graphs up to at least this many tokens, and further if launches also limit larger steps.

With overlap scheduling, the host returns a step's tokens only after it has launched the next step. So slow launches delay
tokens even if they do not delay the device. 2,048 tokens cover the prompt tokens that ``--max-step-ms`` allows in a step with
decodes."""
_MAX_BATCH_ON_GPU = 256
"""Largest decode batch that ``auto`` captures on a GPU. Each capture size takes memory, and time at the start."""
_MAX_BATCH_ON_CPU = 32
"""Largest decode batch that ``auto`` captures on a CPU. Python code takes only a small part of the time of larger batches."""


def launch_bound_tokens(model_config: ModelConfig, tp: int) -> int:
    """Return the number of tokens up to which launching a layer's kernels takes longer than its GEMMs."""
    moe = model_config.moe
    width = model_config.intermediate_size if moe is None else moe.top_k * moe.intermediate_size
    attention = 2 * (model_config.num_q_heads + model_config.num_kv_heads) * model_config.head_dim
    per_token = 2 * model_config.hidden_size * (attention + 3 * width) / tp
    return int(_LAUNCHES_S * _FLOPS / per_token)


class ModelRunnerFactory:
    """Factory of the model runner for a KV pool of any size.

    Attributes:
        attention: classes of the attention backends; the last one serves decodes.
        max_seq_len: maximum length of a sequence by the options, in tokens. The size of the pool may limit it further.
    """

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        groups: RankGroups,
        model: Model,
        ops: Ops,
        registry: Registry,
    ) -> None:
        self._config, self._platform, self._groups = config, platform, groups
        self._model, self._ops = model, ops
        self.attention = [registry.load("attention", name) for name in config.backends.attn.split(",")]
        layers = model.attention_layers()
        stage = model.stage.layers
        windows = model.config.sliding_windows[stage.start : stage.stop]  # a stage may have no layer with a window
        served = replace(model.config, sliding_windows=windows)
        self._spec = spec = attention_spec(config, served, platform.device)
        self.max_seq_len = spec.max_seq_len
        reasons = check_layers(spec, layers)
        if spec.value_head_dim not in (None, spec.head_dim):
            reasons.append("the KV pool stores keys and values of one head dimension")
        if reasons:
            raise ModelFormatError(f"the model {model.config.architecture} is not supported: {'; '.join(reasons)}")
        group = KVGroup(len(layers), spec.page_size, spec.num_kv_heads, spec.head_dim, spec.value_head_dim)
        layout = common_layout(config.backends.attn, registry)
        num_pages = 2  # the padding page, and one for tokens
        self.smallest_pool = KVPoolSpec.of_group(group, num_pages, spec.kv_dtype, platform.device, layout)

    def model_runner(self, pool: KVPoolSpec, max_seq_len: int) -> ModelRunner:
        """Allocate the pool and return a model runner with it."""
        num_rows = self._config.scheduler.max_running_requests
        table = PageTable(num_rows, max_seq_len, pool.page_size, pool.device)
        spec, kv = replace(self._spec, max_seq_len=max_seq_len), KVPool(pool)
        backends = [backend(spec, kv, table.data) for backend in self.attention]
        attention = backends[0] if len(backends) == 1 else CombinedAttention(spec, kv, table.data, *backends)
        return ModelRunner(self._platform, self._groups, self._model, attention, table, self._ops, num_rows)

    def run_profile_batch(self) -> None:
        """Run the step that needs the most memory on a model runner with the smallest pool."""
        limits = self._config.scheduler
        prefill, vocab = int(limits.max_prefill_length), self._model.config.vocab_size
        plan = profile_batch(limits.max_running_requests, prefill, self.max_seq_len, vocab)
        self.model_runner(self.smallest_pool, self.max_seq_len).launch(plan).result()

    def _reasons_against_graphs(self) -> list[str]:
        """Return why no CUDA graph can be captured; empty if they can."""
        platform, parallel = self._platform, self._config.parallel
        reasons = [] if platform.supports_graphs else [f"the platform {platform.name} does not support CUDA graphs"]
        if parallel.pp > 1:
            reasons.append("the stages of a pipeline (--pp) run without CUDA graphs")
        if platform.has_host_graphs and parallel.tp > 1:
            reasons.append("on a CPU, collectives cannot be captured")
        if platform.has_host_graphs and self._model.config.moe is not None:
            reasons.append("on a CPU, experts cannot be captured")
        return reasons

    def decode_graph_sizes(self) -> list[int]:
        """Return the batch sizes of decode steps to capture. Requested sizes that cannot be captured are an error."""
        decode, platform, limits = self.attention[-1], self._platform, self._config.scheduler
        wanted, limit = limits.cuda_graph_max_bs, limits.max_running_requests
        name = self._config.backends.attn.split(",")[-1]
        reasons = self._reasons_against_graphs()
        if not decode.capabilities.cuda_graphs:
            reasons.append(f"the attention backend {name} does not support CUDA graphs")
        if reasons and wanted not in (AUTO, 0):
            raise InvalidValueError("--cuda-graph-max-bs", wanted, f"0 here: {' and '.join(reasons)}")
        if reasons or wanted == 0:
            return []
        if platform.has_host_graphs:  # padding takes time, and sizes are captured when they are needed
            return list(range(1, min(limit, _MAX_BATCH_ON_CPU if wanted == AUTO else int(wanted)) + 1))
        return graph_sizes(min(limit, _MAX_BATCH_ON_GPU) if wanted == AUTO else min(limit, int(wanted)))

    def piecewise_graph_sizes(self, has_decode_graphs: bool) -> list[int]:
        """Return the numbers of tokens to capture piecewise CUDA graphs for.

        With ``auto`` there are none without CUDA graphs of decodes. Otherwise they cover the sizes that kernel launches limit.
        Requested sizes that cannot be captured are an error.
        """
        platform, limits = self._platform, self._config.scheduler
        wanted = limits.piecewise_cuda_graph_max_tokens
        largest = int(limits.max_prefill_length) + limits.max_running_requests
        reasons = self._reasons_against_graphs()
        if reasons and wanted not in (AUTO, 0):
            raise InvalidValueError("--piecewise-cuda-graph-max-tokens", wanted, f"0 here: {' and '.join(reasons)}")
        if wanted == AUTO and platform.has_host_graphs:
            return []
        if wanted == AUTO:
            wanted = max(_MIN_PIECEWISE_TOKENS, launch_bound_tokens(self._model.config, self._config.parallel.tp))
            return piecewise_sizes(min(wanted, largest)) if has_decode_graphs else []
        return piecewise_sizes(min(int(wanted), largest))


def common_layout(names: str, registry: Registry) -> KVLayout:
    """Return a KV layout that all backends of ``--attn`` support; the first backend's order decides.

    If there is none, the error names the installed backends that each can be combined with.
    """
    layouts = {name: _layouts(name, registry) for name in names.split(",")}
    first, *others = layouts.values()
    for layout in first:
        if all(layout in each for each in others):
            return layout
    have = " and ".join(f"{name} supports {' and '.join(each)}" for name, each in layouts.items())
    partners = [
        f"{name} can be combined with {', '.join(_sharing(each, name, registry)) or 'no installed backend'}."
        for name, each in layouts.items()
    ]
    remedy = " ".join([*partners, "See: minisgl plugins check NAME"])
    raise InvalidValueError("--attn", names, f"two backends with a common KV layout; {have}", remedy)


def _layouts(name: str, registry: Registry) -> tuple[KVLayout, ...]:
    backend: type[AttentionBackend] = registry.load("attention", name)
    return backend.capabilities.layouts


def _sharing(layouts: tuple[KVLayout, ...], besides: str, registry: Registry) -> list[str]:
    """Return the other installed backends with one of these layouts. Those that do not load are left out."""
    found = []
    for name in registry.names("attention"):
        with suppress(PluginError):
            if name != besides and set(layouts).intersection(_layouts(name, registry)):
                found.append(name)
    return found
