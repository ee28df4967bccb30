"""A rollout node: an inference engine that samples groups and takes new weights while it runs."""
