"""What a run has to show: verdicts, tables and plots, made of ``results.json`` and nothing else."""
