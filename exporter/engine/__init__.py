"""Pure: facts, history, rules, diagnosis, and the store of facts. No I/O, no clock."""
