"""Benchmark suites of `nearkin bench`."""
