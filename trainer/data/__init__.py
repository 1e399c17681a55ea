"""Data: from any source of rows to checked, rendered, tokenised prompts in a fixed order."""
