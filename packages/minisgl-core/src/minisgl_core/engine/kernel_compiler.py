"""Process that compiles the attention kernels which ``auto`` would have selected, had they been compiled.

The parent writes its options to the process's standard input and keeps that open. When that closes, even because the parent was
killed, the process kills its compilers and ends.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import MinisglError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.utils import logs

logger = logging.getLogger(__name__)

_BACKGROUND_JOBS = 2
"""Compilers that run at a time in the background."""


def start_kernel_compiler(
    config: EngineConfig, log_level: str, log_format: str, *, background: bool
) -> subprocess.Popen[bytes]:
    """Start the process; in the `background`, with the lowest priority and few compilers at a time."""
    env = {"FLASHINFER_LOGGING_LEVEL": "warning"} | os.environ
    if background:
        env |= {"MAX_JOBS": str(_BACKGROUND_JOBS), "FLASHINFER_NVCC_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, env=env, start_new_session=True)
    assert process.stdin is not None
    options = {"config": config.flat(), "log": (log_level, log_format), "background": background}
    process.stdin.write(json.dumps(options).encode() + b"\n")
    process.stdin.flush()
    return process


def stop_kernel_compiler(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and the compilers that it runs, if it has not ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def compile_kernels(config: EngineConfig) -> None:
    """Compile the kernels that ``auto`` would have selected for these options. The next start then selects them."""
    from minisgl_core.config.resolve import attention_spec
    from minisgl_core.engine.build import resolve_options

    registry = Registry.from_environment()
    checkpoint, platform_class, _, resolved = resolve_options(config, registry, Hooks(registry))
    spec = attention_spec(resolved.config, checkpoint.config, platform_class(0).device)
    for name in resolved.uncompiled:
        registry.load("attention", name).compile(spec)


def main() -> None:
    """Compile for the options on standard input."""
    options: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    if os.getpgrp() != os.getpid():  # `_end_with_parent` kills the group, which must not have the parent in it
        os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logs.configure("kernel compiler", *options["log"])
    if options["background"]:
        os.nice(19)
    try:
        compile_kernels(EngineConfig.from_flat(**options["config"]))
    except Exception as error:  # also an error of a compiler or of the device
        if os.environ.get("MINISGL_DEBUG") == "1":
            raise
        text = str(error) if isinstance(error, MinisglError) else f"{type(error).__name__}: {error}"
        sys.exit(f"minisgl: kernels are not compiled: {text}")


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
