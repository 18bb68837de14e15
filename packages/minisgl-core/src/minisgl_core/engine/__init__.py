"""The engine: runs the steps that the scheduler plans, on one rank's device."""
