"""``tiering plan``: what trains where, how long a step takes, and what would make it fit. The engine does without."""
