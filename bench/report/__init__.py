"""The report of a run: verdicts, tables and plots, made of ``results.json`` alone."""
