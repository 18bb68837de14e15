"""Options of ``minisgl launch`` besides those of the engine. Must not import heavy packages."""

from dataclasses import dataclass
from typing import Any

from minisgl_core.config.options import option
from minisgl_core.errors import InvalidValueError

MAX_REPLICAS = 64


class ReplicaRange(int):
    """Value ``MIN:MAX`` of ``--replicas``. As a number it is the minimum."""

    high: int

    @classmethod
    def convert(cls, name: str, text: str) -> Any:
        """Return the range if the text is one. Otherwise return the text, which is then read as a number."""
        low, colon, high = text.partition(":")
        if not colon:
            return text
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= MAX_REPLICAS):
            raise InvalidValueError(name, text, f"a number, or MIN:MAX with 1 <= MIN <= MAX <= {MAX_REPLICAS}")
        converted = cls(low)
        converted.high = int(high)
        return converted

    def __repr__(self) -> str:
        return f'"{int(self)}:{self.high}"'


def _check_printable(name: str, text: str) -> str:
    """Return the text. Line breaks, other control characters, unusual spaces and broken UTF-8 are refused."""
    if not text.isprintable():
        raise InvalidValueError(name, text, "printable characters")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the server; the texts are the help of their flags."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 listens to the whole network.")
    port: int = option(1919, "Port to listen on; 0 chooses a free one and reports it.", low=0, high=65535)
    api_workers: int = option(
        1,
        "Processes of the API server, which share one port. If there are several, one that dies is restarted.",
        low=1,
        high=64,
    )
    num_tokenizers: int | None = option(
        None, "Processes that tokenize prompts and detokenize output; by default, one per API worker.", low=1, high=64
    )
    replicas: int = option(
        1,
        "Engines with the same model, behind one API; each has --tp times --pp devices or, on a CPU, its part of the cores. With"
        " --executor ray they are on a Ray cluster, and MIN:MAX scales their number by the load.",
        low=1,
        high=MAX_REPLICAS,
        metavar="N|MIN:MAX",
        convert=ReplicaRange.convert,
    )
    router: str = option("prefix", "Choice of the replica for a request.", kind="router")
    router_overload_requests: int = option(
        16,
        "With --router prefix, a replica is overloaded if it has over this many requests more than the least loaded one, and"
        " over --router-overload-ratio times as many.",
        low=0,
    )
    router_overload_ratio: float = option(
        1.5, "Ratio to the requests of the least loaded replica; see --router-overload-requests.", low=1.0
    )
    served_model_name: str | None = option(
        None, "Name of the model in the API; by default, its own.", convert=_check_printable
    )
    startup_timeout: float = option(
        1800.0, "Seconds that an engine has to start; one that takes longer is killed, as it may hang.", low=1.0
    )
    drain_timeout: float = option(10.0, "Seconds that running requests have to finish after SIGTERM.", low=0.0)
    api_key: tuple[str, ...] = option(
        (), "API key that requests must send as 'Authorization: Bearer KEY'; may be given several times.", secret=True
    )
    api_key_file: str | None = option(None, "File with API keys, one per line.", metavar="FILE")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Allowed name in the header Host, '*.DOMAIN' or '*' for any; may be given several times. The names of this host are"
        " always allowed. By default, others are allowed only if the server listens beyond this host.",
        metavar="NAME",
    )
    cors_origin: tuple[str, ...] = option(
        (), "Origin whose web pages may use the API, '*' for any; may be given several times.", metavar="ORIGIN"
    )
    max_body_size: int | None = option(
        None,
        "Maximum size of a request body in bytes; larger ones get status 413. By default, 1 MiB + 32 C R bytes"
        " for a context of C tokens and R requests that may run or wait, at most 32 MiB, but at least 1 MiB + 32 C bytes.",
        low=1,
    )
    max_concurrent_requests: int | None = option(
        None, "Maximum number of concurrent POST requests; others get status 429.", low=1
    )
    min_priority: int = option(
        0,
        "Lowest priority that a request may have. Requests with lower values run first, so negative ones let a client run before"
        " all others.",
    )
    max_connections_per_address: int = option(
        1024,
        "Maximum number of connections per address and API worker, except loopback addresses; others get status 429.",
        low=1,
    )
    response_store_size: int | None = option(
        None,
        "Bytes of memory for responses that /v1/responses stores, for previous_response_id; the least recently used are"
        " evicted. 0 stores none. By default 64 MiB, or 0 with several API workers, which would have different ones.",
        low=0,
    )
    metrics: bool = option(True, "Serve Prometheus metrics at /metrics.")
    web_ui: bool = option(
        True,
        "Serve a web UI at / to chat and to watch the engine, and the engine's state at /engine/state, which needs an API"
        " key like the other routes.",
    )
    web_ui_prompts: bool = option(
        False,
        "Show the start of cached prompts and the end of running outputs in the web UI and at /engine/state. Every user sees"
        " those of all users.",
    )
    plugin_routes: bool = option(False, "Serve the routes that installed plugins add to the API.")
    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls; auto detects it from the chat template.",
        choices=(
            "auto",
            "none",
            "deepseek_v3",
            "deepseek_v31",
            "glm45",
            "gpt_oss",
            "hermes",
            "kimi_k2",
            "llama3_json",
            "mistral",
            "mistral_v11",
            "qwen3_coder",
        ),
    )
    reasoning_parser: str | None = option(
        None,
        "Return reasoning as reasoning_content, separate from content; deepseek_r1 is for models that begin to reason without"
        " a tag, gpt_oss for the harmony format.",
        choices=("qwen3", "deepseek_r1", "gpt_oss"),
    )
    trust_request_chat_template: bool = option(
        False, "Render chat templates of requests, each in a process with limits of time and memory."
    )
    compile_only: bool = option(
        False, "Compile all kernels for these options, such as for a container image, and exit without serving."
    )
    log_level: str = option(
        "warning",
        "Lowest level of messages to log; info has one line per request.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    log_format: str = option("text", "Format of log lines.", choices=("text", "json"))

    @property
    def response_store_bytes(self) -> int:
        """Value of ``--response-store-size``, or its default."""
        if self.response_store_size is None:
            return 64 * 2**20 if self.api_workers == 1 else 0
        return self.response_store_size

    @property
    def replica_range(self) -> tuple[int, int]:
        """Minimum and maximum number of replicas."""
        return int(self.replicas), getattr(self.replicas, "high", self.replicas)
