"""What it costs: levels, scalers, boosts and their peers, measured in one run. `python -m mpkit.bench --help`."""
