"""The engine: it runs the scheduler's plans on one rank's device."""
