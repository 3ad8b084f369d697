"""Studies that are not a product feature; run one as `python -m benchmarks.NAME` in the work tree."""
