"""HTTP protocol, middleware and request bodies, below the routes."""
