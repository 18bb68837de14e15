"""HTTP protocol, middleware and request bodies, which come before the routes."""
