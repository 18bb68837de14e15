"""Data that processes and subpackages exchange: messages, batch plans, snapshots and counters."""
