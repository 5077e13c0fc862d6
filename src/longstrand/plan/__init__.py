"""Bytes and seconds of a run before it runs: from a model's shape, a device, a count and a length; no torch."""
