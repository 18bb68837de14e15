"""Providers of `minisgl_core.contracts.ops`: GEMMs, norms, rotary embedding, sampling and step inputs."""
