"""Communicators: collectives between tensor-parallel ranks, and send and receive between pipeline stages."""
