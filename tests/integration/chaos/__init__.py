"""Real faults on real processes and servers, and the state after them."""

import os


SEED = int(os.environ.get("CHAOS_SEED", "1"))
"""The seed of all random choices; set CHAOS_SEED to repeat a run."""
