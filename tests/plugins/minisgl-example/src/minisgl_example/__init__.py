"""An attention backend, a prefix cache, a model and a hook module for minisgl, as small as each can be."""
