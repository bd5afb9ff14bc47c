"""Benchmarks: pure metrics on embeddings, and the evaluations that compute the embeddings and call them."""
