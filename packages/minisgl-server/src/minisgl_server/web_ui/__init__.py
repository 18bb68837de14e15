"""Web UI at ``/`` with a chat and a live view of the engine, added by the hook `api_routes`. Its files need no build step."""
