"""Writes tool calls as models do."""

from __future__ import annotations


def qwen(name: str, **arguments: str) -> str:
    """Write a call as the chat template of Qwen3-Coder does."""
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    """Write a call as the chat template of GLM-4.5 does."""
    lines = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
    return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


def deepseek(name: str, arguments: str) -> str:
    """Write a call as the chat template of DeepSeek-V3.1 does."""
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def deepseek_v3(name: str, arguments: str) -> str:
    """Write a call as the chat template of DeepSeek-V3 does."""
    return deepseek("function", f"{name}\n```json\n{arguments}\n```")


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
