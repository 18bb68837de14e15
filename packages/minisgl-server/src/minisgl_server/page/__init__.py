"""The page at ``/``: chat, and a live view of the engine. Plain files; nothing is built."""
