"""Where uploads go: the Kafka pipeline or a store in this process."""
