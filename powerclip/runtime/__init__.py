"""What every package runs on: processes and ranks, files, signals, progress."""
