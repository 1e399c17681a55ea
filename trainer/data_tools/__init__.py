"""``zero-grpo data``: what a source holds, and other tools' formats as rows that training reads."""
