"""The model runner of a rank: it runs the scheduler's plans on the rank's device."""
