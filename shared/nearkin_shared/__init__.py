"""What two services or more need: types, formats, kernels, object stores, index, reading, Kafka runtime."""
