"""Llama, Qwen2, Qwen3, Qwen3-MoE and Mistral for minisgl, and the checkpoint formats they come in."""
