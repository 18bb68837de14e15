"""Conformance tests of the attention backend."""

from __future__ import annotations

from minisgl_example.attention import ExampleAttention

from minisgl_core.testing.attention_kit import AttentionBackendTests


class TestExampleAttention(AttentionBackendTests):
    """All of the kit's tests."""

    provider = ExampleAttention
