"""What a run writes down: the run directory, the metrics of a step, the rows of a rollout, the lines on the console."""
