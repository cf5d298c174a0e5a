"""Models: functions of a step's batch, the weights and the caches."""
