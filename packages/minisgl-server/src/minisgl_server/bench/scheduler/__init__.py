"""CPU time of the scheduler, without a model: ``minisgl bench scheduler``."""
