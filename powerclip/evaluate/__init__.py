"""Evaluation: tasks, the embedder that scores them, metrics, and readers of benchmarks; the same for every command."""
