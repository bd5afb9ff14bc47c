"""What training and evaluation read: embedded scenes, tokens, batches."""
