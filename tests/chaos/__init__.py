"""Real faults on real processes and servers, and the state after them."""

import os


SEED = int(os.environ.get("CHAOS_SEED", "1"))
"""What all that is random begins with: CHAOS_SEED repeats a run."""
