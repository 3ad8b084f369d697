"""Ingest: stores records of users' Kafka topics as blobs."""
