"""Weights of models: where a checkpoint is found, how it is read, and how a rank loads its shard."""
