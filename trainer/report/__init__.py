"""A run to look at: one HTML page of one run or several, and its rollouts in the terminal. Reads files alone."""
