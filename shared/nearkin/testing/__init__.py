"""Testing. Invariant: nothing outside tests and benchmarks imports this package, and anyone's tests may."""
