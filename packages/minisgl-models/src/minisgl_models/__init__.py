"""Llama, Qwen2, Qwen3, Qwen3-MoE and Mistral for minisgl, and readers for their checkpoint formats."""
