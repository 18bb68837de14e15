"""Attention backends, prefix caches, MoE kernels, communicators and fused kernels for minisgl."""
