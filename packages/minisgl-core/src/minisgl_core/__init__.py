"""The core of minisgl: plugin seams, engine, scheduler, KV pool, and the minisgl command."""
