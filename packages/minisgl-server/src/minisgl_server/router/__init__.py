"""Routers, and the process that routes requests to the replicas of a server."""
