"""Worker processes that need more than one service, put together here."""
