"""Formats of tool calls, by name, and their detection."""

from minisgl_server.parsing.tagged_tool_parser import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    KimiK2Parser,
    MistralV11Parser,
)
from minisgl_server.parsing.tool_parser import (
    HarmonyToolParser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    ToolParser,
)
from minisgl_server.parsing.xml_tool_parser import Glm45Parser, Qwen3CoderParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "glm45": Glm45Parser,
    "gpt_oss": HarmonyToolParser,
    "hermes": HermesParser,
    "kimi_k2": KimiK2Parser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "mistral_v11": MistralV11Parser,
    "qwen3_coder": Qwen3CoderParser,
}
"""Parsers by the values of ``--tool-call-parser``."""


def detect_tool_parser(template: str) -> str | None:
    """Return the parser of the format that a chat template describes, or None if that is not clear."""
    if "<tool_call>" in template:
        if "<function=" in template:
            return "qwen3_coder"
        return "glm45" if "<arg_key>" in template else "hermes"
    if "<|python_tag|>" in template and '"parameters"' in template:
        return "llama3_json"
    if "[TOOL_CALLS]" in template:
        return "mistral_v11" if "[ARGS]" in template else "mistral"
    if "<|tool_call_argument_begin|>" in template:
        return "kimi_k2"
    if "<｜tool▁sep｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<|channel|>" in template and "functions." in template:
        return "gpt_oss"
    return None
