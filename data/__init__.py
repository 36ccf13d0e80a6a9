"""A package of its own, so that no other `data` on the path is taken for this one."""
