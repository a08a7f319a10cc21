"""Why a VMI does not leave its node, what to do about it, and what a drain would do."""
