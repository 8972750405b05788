"""The library inside engines: one module each, imported by nobody but its engine."""
