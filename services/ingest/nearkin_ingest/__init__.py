"""Ingest: store records of users' Kafka topics as blobs."""
