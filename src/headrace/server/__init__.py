"""HTTP in front of an engine: parse, validate, stream. Knows no tensors.

Start with `headrace.server.app`: `create_app` for an engine at hand, `serve` for a configuration.
"""
