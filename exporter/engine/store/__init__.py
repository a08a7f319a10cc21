"""The facts about one cluster, indexed: what belongs to which VMI, and what happened to it."""
