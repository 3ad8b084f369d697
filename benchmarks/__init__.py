"""Studies that are no product feature; run one as `python -m benchmarks.NAME` in the work tree."""
