"""Checks of an installed FlashInfer, and a record of its compiled modules.

FlashInfer compiles a module at its first use, which takes about a minute. Its own cache can only be queried after importing
FlashInfer. So `compile_prefill` records which of its files a spec needs, and `is_compiled` looks for these files.
"""

import fcntl
import hashlib
import json
import os
import threading
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from minisgl_backends.build_cache import cache_dir, is_cached, write_atomically
from minisgl_backends.requirements import import_fails, package_missing
from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.errors import MinisglError
from minisgl_core.kv.pool import KVPool
from minisgl_core.utils.progress import progress_bar

_POLL_S = 0.5


def flashinfer_broken() -> list[str]:
    """Return why an installed FlashInfer cannot be used: its import fails, or it lacks the sources of its kernels."""
    if reasons := import_fails("flashinfer.jit.env"):
        return reasons
    from flashinfer.jit import env

    return [
        f"flashinfer is installed, but {folder} is missing or empty; reinstall flashinfer-python"
        for folder in (env.FLASHINFER_CSRC_DIR, env.FLASHINFER_INCLUDE_DIR)
        if not any(folder.glob("*"))
    ]


def is_compiled(spec: AttentionSpec) -> bool:
    """Return True if the prefill modules for `spec` are known to be compiled, or FlashInfer's jit-cache package is installed."""
    if not package_missing("flashinfer_jit_cache", "flashinfer-jit-cache"):
        return True
    path = _record_path(spec)
    return path is not None and is_cached(path) and all(Path(each).exists() for each in json.loads(path.read_text()))


def compile_prefill(backend: type[AttentionBackend], spec: AttentionSpec) -> None:
    """Compile the prefill modules by running a small prefill, and record their files. Wait if another process compiles them.

    Raises:
        MinisglError: there is no private cache folder for the record, or it is read-only.
    """
    path = _record_path(spec)
    if path is None or not os.access(path.parent, os.W_OK | os.X_OK):
        raise MinisglError("there is no private, writable folder for compiled kernels; set XDG_CACHE_HOME to one")
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_compiled(spec):
            return
        done = threading.Event()
        watcher = threading.Thread(target=_show_progress, args=(done,), daemon=True)
        watcher.start()
        try:
            _run_prefill(backend, spec)
        finally:
            done.set()
            watcher.join()
        write_atomically(json.dumps(_libraries()).encode(), path)


def _record_path(spec: AttentionSpec) -> Path | None:
    """Return the path of the record of a spec's modules, or None without a private cache folder."""
    folder = cache_dir("flashinfer")
    if folder is None:
        return None
    try:
        flashinfer = version("flashinfer-python")
    except PackageNotFoundError:
        flashinfer = ""
    gpu = torch.cuda.get_device_capability(spec.device) if spec.device.type == "cuda" else None
    names = "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_CUDA_ARCH_LIST"
    software = flashinfer, torch.__version__, [os.environ.get(name) for name in names]
    kernels = str(spec.dtype), str(spec.kv_dtype), spec.head_dim, bool(spec.sliding_windows), bool(spec.soft_caps)
    digest = hashlib.sha256(repr((software, gpu, kernels)).encode()).hexdigest()
    return folder / f"{digest[:20]}.json"


def _run_prefill(backend: type[AttentionBackend], spec: AttentionSpec) -> None:
    """Run a prefill of one page in a small pool, with each combination of window and soft cap."""
    size, device = spec.page_size, spec.device
    spec = replace(spec, max_batch=1, max_seq_len=size)
    pool = KVPool(KVPoolSpec(1, 2, size, spec.num_kv_heads, spec.head_dim, spec.kv_dtype, device))
    attention = backend(spec, pool, torch.zeros(2, 1, dtype=torch.int32, device=device))
    lens = np.array([size], np.int32)
    batch = AttentionBatch(
        num_decodes=0,
        rows=torch.ones(1, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, size], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([size], dtype=torch.int32, device=device),
        slots=torch.arange(size, device=device),
        q_lens_host=lens,
        seq_lens_host=lens,
    )
    q = torch.zeros(size, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
    k = torch.zeros(size, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
    plan = attention.plan(batch)
    for window in (None, *spec.sliding_windows):
        for cap in (None, *spec.soft_caps):
            attention.forward(q, k, k, AttentionLayer(0, 1.0, sliding_window=window, soft_cap=cap), plan)
    torch.cuda.synchronize(device)


def _libraries() -> list[str]:
    """Return the files of the modules that this process has used."""
    from flashinfer.jit.core import jit_spec_registry

    specs = jit_spec_registry.get_all_specs().values()
    return [str(spec.get_library_path()) for spec in specs if spec.is_compiled]


def _show_progress(done: threading.Event) -> None:
    """Show a bar of the compiled object files until `done` is set."""
    with progress_bar() as bar:
        task = bar.add_task("Compiling FlashInfer's prefill in the background")
        while not done.wait(_POLL_S):
            try:
                from flashinfer.jit.core import jit_spec_registry

                specs = list(jit_spec_registry.get_all_specs().values())
                objects: list[Path] = [path for spec in specs for path in spec.get_object_paths()]
            except Exception:  # FlashInfer is being imported, or has no such method; only the bar needs it
                continue
            bar.update(task, completed=sum(path.exists() for path in objects), total=len(objects) or None)
