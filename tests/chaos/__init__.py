"""Faults that are really made, on real processes and real servers, and what is left after them."""

import os


SEED = int(os.environ.get("CHAOS_SEED", "1"))
"""What all that is random begins with: CHAOS_SEED repeats a run."""
