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
    api_key: tuple[str, ...] = option(
        (), "Key that requests must bring as 'Authorization: Bearer KEY'; may be given several times.", secret=True
    )
    api_key_file: str | None = option(None, "File with such keys, one a line.", metavar="FILE")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Name that requests may have as Host, '*.DOMAIN' or '*' for any; may be given several times. This host's own names"
        " always may; others may by default where the server listens to more than this host.",
        metavar="NAME",
    )
    cors_origin: tuple[str, ...] = option(
        (), "Origin whose web pages may use the API, '*' for any; may be given several times.", metavar="ORIGIN"
    )
    max_body_size: int | None = option(
        None,
        "Largest body of a request in bytes, decompressed; others get status 413. By default, 1 MiB and 32 bytes for each"
        " token of as many prompts as may run and wait, up to 32 MiB or one prompt.",
        low=1,
    )
    max_concurrent_requests: int | None = option(
        None, "Most POST requests served at a time; others get status 429.", low=1
    )
    max_connections_per_address: int = option(
        1024, "Most connections at a time from one address other than this host's own; others get status 429.", low=1
    )
    response_store_size: int = option(
        64 * 2**20,
        "Bytes of memory for responses that /v1/responses keeps, for previous_response_id; those used longest ago make"
        " room. 0 keeps none.",
        low=0,
    )
    metrics: bool = option(True, "Serve Prometheus metrics at /metrics.")
    page: bool = option(
        True,
        "Serve a page to chat and to watch the engine at /, and what it shows at /engine/state, for everyone who may use"
        " the API.",
    )
    page_prompts: bool = option(
        False,
        "Show beginnings of cached prompts and ends of running answers on the page and at /engine/state, whoever's they"
        " are.",
    )
    plugin_routes: bool = option(False, "Serve the routes that installed plugins add to the API.")
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls: as Hermes and Qwen or as Llama 3 do; auto asks its chat template.",
        choices=("auto", "none", "hermes", "llama3_json"),
    )
    reasoning_parser: str | None = option(
        None,
        "Tell a model's thoughts from its answers, as reasoning_content; deepseek_r1 is for models that think without a"
        " tag at the beginning.",
        choices=("qwen3", "deepseek_r1"),
    )
    trust_request_chat_template: bool = option(
        False, "Render chat templates that requests bring; each in a process with limits of time and memory."
    )
    log_level: str = option(
        "warning",
        "Least important messages to log; info has a line for each request.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    log_format: str = option("text", "Log lines for people or for programs.", choices=("text", "json"))
