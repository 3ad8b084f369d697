"""All stages in one process: the runner of local stores and of the embedded gateway."""
