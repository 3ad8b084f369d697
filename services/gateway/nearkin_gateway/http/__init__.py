"""HTTP: bodies, headers, ranges, limits, problems, responses."""
