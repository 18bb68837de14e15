"""Options of ``minisgl launch`` besides the engine's. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_core.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where and how to serve."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 listens to the whole network.")
    port: int = option(1919, "Port to listen on; 0 chooses a free one and reports it.", low=0, high=65535)
    num_tokenizers: int = option(1, "Processes that tokenize prompts and detokenize output.", low=1, high=64)
    served_model_name: str | None = option(None, "The model's name in the API; its own where it is missing.")
    drain_timeout: float = option(10.0, "Seconds that running requests get to finish at SIGTERM.", low=0.0)
    log_level: str = option(
        "warning", "Least important messages to log.", choices=("debug", "info", "warning", "error", "critical")
    )
