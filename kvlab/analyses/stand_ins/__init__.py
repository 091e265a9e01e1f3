"""Which measure predicts the answer? Stand-ins for scores of tasks, correlated with what the model then says."""
