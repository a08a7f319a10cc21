"""Whether a VMI may be evicted now: the rules, the cooldown, and the view of all verdicts."""
