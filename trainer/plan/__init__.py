"""What a run will hold in memory, by closed formulas: no model, no tensor, no torch."""
