"""One run on several ranks: the first one leads, the others do their share of every step and nothing else."""
