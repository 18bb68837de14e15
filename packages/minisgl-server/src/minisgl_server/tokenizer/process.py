"""Main function of a tokenizer worker's process."""

import os
import sys
from typing import Any

from minisgl_core.config.options import EngineConfig
from minisgl_core.engine.startup_timer import StartupTimer, process_age_s
from minisgl_core.errors import MinisglError
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import EngineInfo, Ready, Stop
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender
from minisgl_core.runtime.supervisor import Report
from minisgl_core.text.chat import read_chat_template
from minisgl_core.text.tokens import max_token_bytes
from minisgl_core.weights.model_source import locate_model, open_weights
from minisgl_server.options import ServerOptions
from minisgl_server.parsing.chat_format import ChatFormat
from minisgl_server.tokenizer.tokenizer_queue import TokenizerQueue
from minisgl_server.tokenizer.worker import Message, TokenizerWorker


def run_tokenizer_worker(
    config: EngineConfig, options: ServerOptions, index: int, addresses: IpcAddresses, report: Report
) -> None:
    """Run the process: load the tokenizer, wait for `EngineInfo`, then handle messages until `Stop` or `END_SIGNAL`."""
    api_worker_id = index % addresses.num_api_workers
    with (
        Receiver[Any](addresses.tokenizer_in[index], EngineInfo | Message | Stop) as receiver,
        Sender(addresses.router_in) as to_scheduler,
        Sender(addresses.of_api_worker(api_worker_id).api_in) as to_api,
    ):
        timer = StartupTimer(process_age_s())
        _import_transformers_without_torch()
        path, registry = locate_model(config.model), Registry.from_environment()
        timer.done("started the process")
        try:
            tokenizer = open_weights(path, registry, dummy=config.model.dummy_weight).tokenizer()
        except MinisglError:
            # Wait until the engine is ready, so that its own error on a broken checkpoint is reported instead of this one.
            receiver.receive()
            raise
        timer.done("loaded the tokenizer")
        info = receiver.receive()
        if isinstance(info, Stop):
            return
        assert isinstance(info, EngineInfo), "the launcher sends EngineInfo before anything else"
        if config.model.chat_template is not None:
            tokenizer.chat_template = read_chat_template(config.model.chat_template)
        chat_format = ChatFormat(tokenizer, options.tool_call_parser, options.reasoning_parser)
        worker = TokenizerWorker(
            tokenizer,
            info,
            index,
            to_scheduler.send,
            to_api.send,
            chat_format,
            registry,
            addresses.num_replicas,
            api_worker_id,
            lambda successor: to_api.reconnect(addresses.of_api_worker(successor).api_in),
        )
        report(
            Ready(
                process=f"tokenizer {index}",
                has_chat_template=tokenizer.chat_template is not None,
                max_token_bytes=max_token_bytes(tokenizer),
            )
        )
        TokenizerQueue(worker).run(receiver)


def _import_transformers_without_torch() -> None:
    """Import transformers as if PyTorch were not installed, which no tokenizer needs. That saves most of its time and memory.

    Plugins in this process can import torch afterwards.
    """
    if "torch" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no "PyTorch was not found"
    sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch` raises ModuleNotFoundError
    try:
        import transformers  # noqa: F401  # looks for torch once per process
    finally:
        del sys.modules["torch"]
