"""ASGI middleware: access log, metrics, CORS, tracing, shutdown."""
