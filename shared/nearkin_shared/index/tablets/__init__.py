"""Index that finds chunks through the directories of their containers."""
