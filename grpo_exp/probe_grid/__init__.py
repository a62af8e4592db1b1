"""``grpo-exp probe``: how far generators and trainer are apart on the same weights, cell by cell, without training."""
