"""Store in one folder: writer, index life cycle, garbage collection and repair of one writing process."""
