"""A real model and a real vocabulary, assembled from package registries for the slow tests and the benches."""
