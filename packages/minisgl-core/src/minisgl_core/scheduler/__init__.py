"""The scheduler: it chooses the requests of each batch and assigns KV pages. Pure Python and NumPy, without device work."""
