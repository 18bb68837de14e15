"""Data that crosses processes and rooms: messages, batch plans, snapshots and counters."""
