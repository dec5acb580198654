"""How sparse RL is: runs, their counts, tables and plots. `python -m research.study --help` says what can be run."""
