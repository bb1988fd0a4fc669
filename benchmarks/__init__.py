"""Benchmarks; each is a module of its own, run as ``python -m benchmarks.NAME``."""
