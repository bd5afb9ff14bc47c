"""What training and evaluation read: scenes, corpora, shards, sidecars, tokens, batches."""
