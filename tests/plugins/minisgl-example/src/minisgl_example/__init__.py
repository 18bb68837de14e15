"""An attention backend, a prefix cache and a model for minisgl, as small as each can be."""
