"""The learner: a Megatron-Core world that trains the policy and owns its version."""
