"""The learner's Megatron side: the only place that imports megatron."""
