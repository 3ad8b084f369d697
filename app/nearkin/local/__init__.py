"""Store in one folder: writer, index life cycle, garbage collection, repair, locks."""
