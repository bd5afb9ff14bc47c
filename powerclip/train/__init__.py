"""Training: recipes, the loop, checkpoints and what a run writes down."""
