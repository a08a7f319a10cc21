"""The history that outlives the process: its format, and who writes it where."""
