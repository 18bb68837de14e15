"""Simulation of replicas behind the real router, in virtual time."""
