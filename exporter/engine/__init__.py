"""Pure code: facts, history, rules, diagnosis, and the store. It does no I/O and reads no clock."""
